"""The importance table I[i, j, a, b]: measured block by block with one of several methods, on any executor."""

from __future__ import annotations

from typing import TYPE_CHECKING

from depthfold.support.optional import lazy_getattr

if TYPE_CHECKING:
    from depthfold.importance.definition import importance_plan, importance_student
    from depthfold.importance.measure import measure_importance
    from depthfold.importance.methods import Method, MethodName, check_method
    from depthfold.importance.options import importance_options, layer_weights, left_out_options
    from depthfold.importance.table_warnings import IncompleteTable, SmallHoldout

# Imported on first use: the names of the methods do not need torch.
__getattr__ = lazy_getattr(
    __name__,
    {
        "definition": "importance_plan importance_student",
        "table_warnings": "IncompleteTable SmallHoldout",
        "measure": "measure_importance",
        "methods": "Method MethodName check_method",
        "options": "importance_options layer_weights left_out_options",
    },
)

__all__ = [
    "IncompleteTable", "Method", "MethodName", "SmallHoldout", "check_method", "importance_options",
    "importance_plan", "importance_student", "layer_weights", "left_out_options", "measure_importance",
]  # fmt: skip
