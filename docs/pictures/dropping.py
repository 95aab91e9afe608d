"""Draw dropping.svg, the picture of docs/dropping.md: python docs/pictures/dropping.py"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

INK, MUTED, LINE, BLUE, FAINT, ORANGE = "#1d2227", "#59626b", "#9aa1a8", "#0b6a9c", "#edf5f9", "#bf5000"
WIDTH, ROW, TOP = 980, 122, 8
LEFT, CHAIN, RIGHT = 20, 260, 700  # columns: the name of the move, the layers, the result
BOX, GAP, HEIGHT = 76, 50, 34


@dataclass(frozen=True)
class Row:
    """One move: the layers that it drops, those that it merges, and the activations that stay."""

    name: str
    formula: str
    result: str
    remark: str
    dropped: tuple[int, ...] = ()
    merged: bool = False
    activations: tuple[int, ...] = (1, 2, 3)


ROWS = (
    Row("The network", "y = \u03c3(x + f\u2083(\u03c3(f\u2082(x))))", "3\u00d73, 3\u00d73", "two convolutions"),
    Row("Merge", "y = \u03c3(x + f\u2083(f\u2082(x)))", "5\u00d75", "one convolution, which includes the skip",
        merged=True, activations=(1, 3)),
    Row("Drop layer 2", "y = \u03c3(x + f\u2083(x))", "3\u00d73", "one convolution, which includes the skip",
        dropped=(2,), merged=True, activations=(1, 3)),
    Row("Drop the branch (1, 3]", "y = \u03c3(x)", "nothing", "only the skip and the activation are left",
        dropped=(2, 3), activations=(1, 3)),
)  # fmt: skip


def text(x: float, y: float, words: str, size: int = 14, colour: str = INK, more: str = "") -> str:
    return f'<text x="{x}" y="{y}" font-size="{size}" fill="{colour}" {more}>{words}</text>'


def layer(l: int, row: Row, y: float) -> Iterator[str]:
    """Yield the convolution l and the activation after it."""
    x = CHAIN + (l - 1) * (BOX + GAP)
    gone = l in row.dropped
    stroke = f'stroke="{ORANGE}" stroke-dasharray="5 4"' if gone else f'stroke="{INK}"'
    yield f'<rect x="{x}" y="{y - HEIGHT / 2}" width="{BOX}" height="{HEIGHT}" rx="6" fill="#ffffff" {stroke}/>'
    strike = f'text-anchor="middle" text-decoration="{"line-through" if gone else "none"}"'
    yield text(x + BOX / 2, y + 5, f"f{chr(0x2080 + l)} 3\u00d73", 14, ORANGE if gone else INK, strike)
    middle = x + BOX + GAP / 2 + (18 if l == 3 else -5 if l == 1 else 0)
    if l in row.activations:
        yield f'<circle cx="{middle}" cy="{y}" r="10" fill="{BLUE}"/>'
        yield text(middle, y + 4, "\u03c3", 12, "#ffffff", 'text-anchor="middle"')
    elif l not in row.dropped or l + 1 not in row.dropped:
        yield f'<circle cx="{middle}" cy="{y}" r="10" fill="#ffffff" stroke="{ORANGE}" stroke-dasharray="3 3"/>'


def drawn(n: int, row: Row) -> Iterator[str]:
    y = TOP + n * ROW + 74
    if n:
        yield f'<line x1="0" x2="{WIDTH}" y1="{TOP + n * ROW}" y2="{TOP + n * ROW}" stroke="#e3e5e7"/>'
    yield text(LEFT, y - 6, row.name, 16, INK, 'font-weight="600"')
    yield text(LEFT, y + 18, row.formula, 14, MUTED)
    start, end = CHAIN + BOX + GAP - 11, CHAIN + 3 * BOX + 2 * GAP + 14
    yield f'<line x1="{CHAIN - 18}" x2="{end + 52}" y1="{y}" y2="{y}" stroke="{LINE}" stroke-width="2"/>'
    if row.merged:  # one box around the layers, the skip and the addition
        x, width = start - 4, end - start + 15
        yield (
            f'<rect x="{x}" y="{y - 54}" width="{width}" height="80" rx="9" fill="{FAINT}" stroke="{BLUE}" '
            'stroke-width="2"/>'
        )
        yield f'<line x1="{x}" x2="{x + width}" y1="{y}" y2="{y}" stroke="{LINE}" stroke-width="2"/>'
    alone = len(row.dropped) == 2
    yield (
        f'<path d="M{start} {y} C{start} {y - 62} {end} {y - 62} {end} {y - 8}" fill="none" '
        f'stroke="{BLUE if alone else LINE}" stroke-width="{3 if alone else 2}"/>'
    )
    for l in (1, 2, 3):
        yield from layer(l, row, y)
    yield f'<circle cx="{end}" cy="{y}" r="8" fill="#ffffff" stroke="{INK}"/>'
    yield text(end, y + 5, "+", 15, INK, 'text-anchor="middle"')
    yield text(RIGHT, y - 6, f"layers 2 and 3: {row.result}", 15, BLUE, 'font-weight="600"')
    yield text(RIGHT, y + 18, row.remark, 12, MUTED)


def picture() -> str:
    height = TOP + len(ROWS) * ROW + 4
    parts = [part for n, row in enumerate(ROWS) for part in drawn(n, row)]
    title = "What the moves leave of a residual block: merging, a dropped layer and a dropped branch"
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
            'font-family="system-ui, Segoe UI, DejaVu Sans, sans-serif" role="img">',
            f"<title>{title}</title>",
            f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
            *parts,
            "</svg>\n",
        )
    )


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(picture(), encoding="utf-8")
