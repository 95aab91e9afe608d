"""The two-stage dynamic program: from the two tables to every optimal plan. NumPy only, no torch."""

from depthfold.solver.checks import check_importance
from depthfold.solver.implausible import ImplausibleImportances
from depthfold.solver.objective import checked_alpha, objective
from depthfold.solver.solve import solve
from depthfold.solver.surrogate import FEWEST, fit_to_plans

__all__ = [
    "FEWEST", "ImplausibleImportances", "check_importance", "checked_alpha", "fit_to_plans",
    "objective", "solve",
]  # fmt: skip
