"""Stage one of the dynamic program, which the solver and the importance measurement share. NumPy only, no torch."""

from depthfold.stage_one.algorithms import (
    NEVER,
    Floats,
    Ints,
    algorithm_1,
    algorithm_3,
    time_along_activations,
    time_array,
)
from depthfold.stage_one.useless import SAVES_NO_TIME, other_network, useless_blocks

__all__ = [
    "NEVER", "SAVES_NO_TIME", "Floats", "Ints", "algorithm_1", "algorithm_3", "other_network",
    "time_along_activations", "time_array", "useless_blocks",
]  # fmt: skip
