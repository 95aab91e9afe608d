"""The two-stage dynamic program: from the two tables to every optimal plan. NumPy only, no torch."""

from depthfold.solver.checks import check_importance
from depthfold.solver.problem import Normalisation, checked_alpha, normalised
from depthfold.solver.solve import solve

__all__ = ["Normalisation", "check_importance", "checked_alpha", "normalised", "solve"]
