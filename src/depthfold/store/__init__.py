"""What is kept on disk while a run goes on."""

from depthfold.store.journal import HeaderMismatch, Journal
from depthfold.store.run_folder import RunFolder

__all__ = ["HeaderMismatch", "Journal", "RunFolder"]
