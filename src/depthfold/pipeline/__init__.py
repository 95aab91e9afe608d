"""compress(), which runs all stages in a run folder, and the stages that it consists of."""

from __future__ import annotations

from typing import TYPE_CHECKING

from depthfold.support.optional import lazy_getattr

if TYPE_CHECKING:
    from depthfold.pipeline.compression import Compressed, compress
    from depthfold.pipeline.options import Options
    from depthfold.pipeline.surrogate import fit_surrogate

# Imported on first use: the command line reads the options without importing torch.
__getattr__ = lazy_getattr(
    __name__, {"compression": "Compressed compress", "options": "Options", "surrogate": "fit_surrogate"}
)

__all__ = ["Compressed", "Options", "compress", "fit_surrogate"]
