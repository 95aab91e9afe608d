"""The pipeline: the one place where the stages meet."""

from depthfold.pipeline.compress import Compressed, compress

__all__ = ["Compressed", "compress"]
