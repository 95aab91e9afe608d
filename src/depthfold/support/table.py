"""Tables that are printed as text in a terminal and shown as HTML in a notebook."""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from depthfold.support.text import text_table

ROWS = 20  # of a table in a notebook
# Notebooks align cells to the right. Colours are left to their theme, which may be light or dark.
_CELL = ' style="text-align:left"'


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text with a header, and the lines before and after them.

    Empty lines separate paragraphs in the text and are left out in HTML. `left_out` is the number of rows that exist in
    addition to `rows`.
    """

    lines: tuple[str, ...]
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()
    left_out: int = 0

    def text(self) -> str:
        """Return the lines, all rows with aligned columns, and the notes."""
        return "\n".join([*self.lines, *(text_table(self.header, self.rows) if self.rows else ()), *self.notes])

    def html(self) -> str:
        """Return the lines, at most ROWS rows, the number of other rows, and the notes."""
        return "\n".join(['<div class="depthfold">', *self._html(), "</div>"])

    def _html(self) -> Iterator[str]:
        yield from _paragraphs(self.lines)
        if self.rows:
            yield f"<table><thead>{_row('th', self.header)}</thead><tbody>"
            yield from (_row("td", row) for row in self.rows[:ROWS])
            yield "</tbody></table>"
        if left_out := self.left_out + max(len(self.rows) - ROWS, 0):
            yield f"<p>... {left_out:,} more</p>"
        yield from _paragraphs(self.notes)


def _row(tag: str, cells: Iterable[str]) -> str:
    return f"<tr>{''.join(f'<{tag}{_CELL}>{html.escape(cell)}</{tag}>' for cell in cells)}</tr>"


def _paragraphs(lines: Iterable[str]) -> Iterator[str]:
    return (f"<p>{html.escape(line.strip())}</p>" for line in lines if line)
