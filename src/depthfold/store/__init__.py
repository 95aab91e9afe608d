"""Files of a run: journals, the run folder, atomic writes and locks."""

from depthfold.store.files import lock, put_all_in_place, put_in_place
from depthfold.store.journal import HeaderMismatch, Journal, differences, journal_in
from depthfold.store.run_folder import RunFolder

__all__ = [
    "HeaderMismatch", "Journal", "RunFolder", "differences", "journal_in", "lock", "put_all_in_place", "put_in_place",
]  # fmt: skip
