"""Pure tensor mathematics: convolutions as data, composed in float64."""

from depthfold.algebra.compose import compose_weights
from depthfold.algebra.kernel import Kernel, NormStatistics, fold_norm

__all__ = ["Kernel", "NormStatistics", "compose_weights", "fold_norm"]
