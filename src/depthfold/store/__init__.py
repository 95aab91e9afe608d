"""What is kept on disk while a run goes on."""

from depthfold.store.journal import HeaderMismatch, Journal

__all__ = ["HeaderMismatch", "Journal"]
