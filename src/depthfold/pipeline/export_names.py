"""Names of files to export: meant from the run folder, inside it, and none of the run's own."""

from __future__ import annotations

from pathlib import PurePath

from depthfold.errors import InvalidValue
from depthfold.importance.ledger import FILE as IMPORTANCE_JOURNAL
from depthfold.store import run_folder

OWN = frozenset(
    {
        run_folder.NETWORK,
        run_folder.WEIGHTS,
        run_folder.LATENCY,
        run_folder.LATENCY_JOURNAL,
        run_folder.IMPORTANCE,
        IMPORTANCE_JOURNAL,
        run_folder.CHOICE,
        run_folder.STUDENTS,
        run_folder.RESULT,
        run_folder.RESULT_OF,
        run_folder.FINDINGS,
        run_folder.REPORT,
        run_folder.CONFIG,
    }
)


def expect_export_name(name: str) -> None:
    """Refuse a name that leaves the run folder, or that falls on a file or into a folder of the run's own."""
    path = PurePath(name)
    if path.is_absolute() or ".." in path.parts or name.startswith("~"):
        raise InvalidValue(
            f"The file {name!r} would lie outside the run folder. Names of exports are meant from there: write "
            f"{path.name}, for example, and copy the file wherever it is needed."
        )
    # Some file systems do not tell large letters from small ones.
    if path.parts and path.parts[0].lower() in OWN:
        raise InvalidValue(
            f"The file {name!r} falls on {path.parts[0]}, which the run keeps for itself. Write {path.name}, or name "
            "another folder: exports/" + path.name + "."
        )
