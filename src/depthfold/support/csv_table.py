"""Reading and writing tables as CSV, with the line number in error messages.

The published tables were written by other programs: they may have an index column and further columns, and integers and
flags may be written as 3, 3.0 or True. Unknown columns are ignored.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from depthfold.errors import InvalidValue, TableError

FLAGS = {"true": True, "false": False, "1": True, "0": False, "1.0": True, "0.0": False}

Entry = TypeVar("Entry")


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a CSV file. `read_entries` adds the line number to its error messages."""

    cells: Mapping[str, str]

    def number(self, column: str) -> float:
        try:
            return float(self.cells[column])
        except ValueError:
            found = repr(self.cells[column]) if self.cells[column] else "nothing"
            raise TableError(f"column {column!r} must hold a number, found {found}.") from None

    def whole(self, column: str) -> int:
        value = self.number(column)
        if not value.is_integer():
            raise TableError(f"column {column!r} must hold a whole number, found {self.cells[column]!r}.")
        return int(value)

    def ends(self) -> tuple[int, int]:
        """Return the ends of the span, in the columns that both tables have."""
        i, j = self.whole("st"), self.whole("end")
        if not 0 <= i < j:
            raise TableError(f"expected positions 0 <= st < end, found st={i}, end={j}.")
        return i, j

    def flag(self, column: str) -> bool:
        found = self.cells[column].lower()
        if found not in FLAGS:
            raise TableError(f"column {column!r} must hold 0 or 1, found {self.cells[column]!r}.")
        return FLAGS[found]

    def text(self, column: str) -> str | None:
        """Return the text of a cell, or None if the column is missing or the cell is blank or "nan"."""
        cell = self.cells.get(column, "")
        return None if cell.lower() in ("", "nan") else cell


def read_entries(
    path: str | Path, columns: Sequence[str], optional: Sequence[str], entry: Callable[[Row], Entry]
) -> tuple[Entry, ...]:
    """Return an entry for each line of a CSV file. `columns` are required, `optional` ones may be missing."""
    entries = []
    for where, row in _rows(path, columns, optional):
        try:
            entries.append(entry(row))
        except (TableError, InvalidValue) as error:
            raise TableError(f"{where}: {error}") from error
    return tuple(entries)


def write_entries(
    path: str | Path, columns: Sequence[str], optional: Sequence[str], entries: Iterable[Sequence[object]]
) -> None:
    """Write a CSV file with a line for each entry, which has a cell for every column, None if it is empty.

    Of the `optional` columns, only those are written in which an entry has something. Floats are written without loss.
    """
    rows = [["" if cell is None else cell for cell in entry] for entry in entries]
    names = (*columns, *optional)
    used = [n for n in range(len(names)) if n < len(columns) or any(row[n] != "" for row in rows)]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows([[row[n] for n in used] for row in (names, *rows)])
    Path(path).write_text(text.getvalue(), encoding="utf-8")


def _rows(path: str | Path, columns: Sequence[str], optional: Sequence[str]) -> Iterator[tuple[str, Row]]:
    lines = _lines(path)
    header = [name.strip() for name in next(lines, (1, []))[1]]
    expected = f"Expected the columns {','.join(columns)} and optionally {','.join(optional)}"
    if missing := [column for column in columns if column not in header]:
        found = ",".join(header) or "an empty file"
        raise TableError(f"{path}: the column {missing[0]!r} is missing. {expected}; found {found}.")
    if twice := [column for column in (*columns, *optional) if header.count(column) > 1]:
        raise TableError(f"{path}: the column {twice[0]!r} appears twice. Remove one of them.")
    for number, cells in lines:
        if not any(cell.strip() for cell in cells):
            continue
        if len(cells) != len(header):
            raise TableError(f"{path}, line {number}: expected {len(header)} columns, found {len(cells)}.")
        yield f"{path}, line {number}", Row(dict(zip(header, (cell.strip() for cell in cells), strict=True)))


def _lines(path: str | Path) -> Iterator[tuple[int, list[str]]]:
    """Yield the number and the cells of every line."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise TableError(f"The table {str(path)!r} cannot be read: {error.strerror}. Check the path.") from error
    except UnicodeDecodeError as error:
        raise TableError(f"The table {str(path)!r} is not text: {error}. Expected CSV in UTF-8.") from error
    reader = csv.reader(io.StringIO(text))
    try:
        for cells in reader:
            yield reader.line_num, cells
    except csv.Error as error:
        raise TableError(
            f"{path}, line {reader.line_num}: this is not CSV: {error}. Expected short cells separated by commas."
        ) from error
