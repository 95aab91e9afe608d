"""The two-stage dynamic program: from the two tables to every optimal plan, exactly. NumPy, no torch."""

from depthfold.solver.normalise import Normalisation, normalised
from depthfold.solver.program import solve

__all__ = ["Normalisation", "normalised", "solve"]
