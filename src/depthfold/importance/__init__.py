"""The importance table I[i, j, a, b]: one short training per block, on any executor, resumable."""

from depthfold.importance.definition import importance_plan, importance_student
from depthfold.importance.measure import IncompleteTable, measure_importance

__all__ = ["IncompleteTable", "importance_plan", "importance_student", "measure_importance"]
