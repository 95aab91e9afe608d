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
from depthfold.stage_one.checks import check_network, check_shapes, other_network
from depthfold.stage_one.shapes import Shapes
from depthfold.stage_one.times import Times
from depthfold.stage_one.useless import DROPS_SAVE_NO_TIME, LEFT_OUT, SAVES_NO_TIME, useless_options

__all__ = [
    "DROPS_SAVE_NO_TIME", "LEFT_OUT", "NEVER", "SAVES_NO_TIME", "Floats", "Ints", "Shapes", "Times", "algorithm_1",
    "algorithm_3", "check_network", "check_shapes", "other_network", "time_along_activations", "time_array",
    "useless_options",
]  # fmt: skip
