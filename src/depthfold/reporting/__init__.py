"""The report: what a run found, as one HTML page that works offline."""

from depthfold.reporting.findings import Evaluation, Findings, Verified
from depthfold.reporting.report import report

__all__ = ["Evaluation", "Findings", "Verified", "report"]
