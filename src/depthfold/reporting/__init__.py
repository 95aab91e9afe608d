"""The findings of a run, and the report that shows them as one HTML page."""

from depthfold.reporting.findings import Evaluation, Findings, Int8File, TrainingPoint, Verified
from depthfold.reporting.report import report

__all__ = ["Evaluation", "Findings", "Int8File", "TrainingPoint", "Verified", "report"]
