"""The CSV side of the tables: rows by column name, with messages that say where in the file something is wrong.

The published tables were written by other programs: they may have an index column and further columns, and whole
numbers and flags may be written as 3, 3.0 or True. All of that is read; columns that nobody asked for are ignored.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from depthfold.errors import TableError

FLAGS = {"true": 1.0, "false": 0.0}


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a CSV file."""

    where: str
    cells: Mapping[str, str]

    def number(self, column: str) -> float:
        text = self.cells[column].lower()
        try:
            return FLAGS[text] if text in FLAGS else float(text)
        except ValueError:
            found = f"{self.cells[column]!r}" if text else "nothing"
            raise TableError(f"{self.where}: column {column!r} must hold a number, found {found}.") from None

    def whole(self, column: str) -> int:
        value = self.number(column)
        if not value.is_integer():
            raise TableError(f"{self.where}: column {column!r} must hold a whole number, found {self.cells[column]!r}.")
        return int(value)

    def ends(self) -> tuple[int, int]:
        """The span of the row, as both tables name it."""
        i, j = self.whole("st"), self.whole("end")
        if not 0 <= i < j:
            raise TableError(f"{self.where}: expected positions 0 <= st < end, found st={i}, end={j}.")
        return i, j

    def flag(self, column: str) -> bool:
        value = self.number(column)
        if value not in (0.0, 1.0):
            raise TableError(f"{self.where}: column {column!r} must hold 0 or 1, found {self.cells[column]!r}.")
        return bool(value)

    def text(self, column: str) -> str | None:
        """The cell as it is, or None where the file lacks the column, the cell is blank, or it says nan."""
        cell = self.cells.get(column, "")
        return None if cell.lower() in ("", "nan") else cell


def read_rows(path: str | Path, columns: Sequence[str]) -> Iterator[Row]:
    """The lines of a CSV file that has at least these columns."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise TableError(f"The table {str(path)!r} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise TableError(f"The table {str(path)!r} is not text: {error}. Expected CSV in UTF-8.") from error
    reader = csv.reader(io.StringIO(text))
    header = [name.strip() for name in next(reader, [])]
    if missing := [column for column in columns if column not in header]:
        raise TableError(
            f"{path}: the column {missing[0]!r} is missing. Expected the columns {','.join(columns)}, "
            f"found {','.join(header) or 'an empty file'}."
        )
    for number, cells in enumerate(reader, start=2):
        if not any(cell.strip() for cell in cells):
            continue
        if len(cells) != len(header):
            raise TableError(f"{path}, line {number}: expected {len(header)} columns, found {len(cells)}.")
        yield Row(f"{path}, line {number}", dict(zip(header, (cell.strip() for cell in cells), strict=True)))


def write_rows(path: str | Path, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """A CSV file; floats are written so that reading them gives the same floats again."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([["" if cell is None else cell for cell in row] for row in rows])
    Path(path).write_text(text.getvalue(), encoding="utf-8")
