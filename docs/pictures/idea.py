"""Draw idea-light.svg and idea-dark.svg, the picture of the README: python docs/pictures/idea.py"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

WIDTH, HEIGHT, LEFT = 920, 318, 250
BOX, GAP, TALL = 54, 40, 36
KERNELS = ("1\u00d71", "3\u00d73", "1\u00d71", "1\u00d71", "3\u00d73", "1\u00d71", "3\u00d73")
KEPT = 3  # the activation after the third layer
DROPPED = 7  # the last layer
ROWS = (56, 148, 240)
TITLE = (
    "Seven convolutions become two: activations are removed, a layer is dropped, and convolutions in a row are merged"
)


@dataclass(frozen=True)
class Theme:
    """The colours of one of the two files."""

    name: str
    ink: str
    muted: str
    line: str
    blue: str
    faint: str
    orange: str
    on_blue: str


THEMES = (
    Theme("light", "#1d2227", "#59626b", "#9aa1a8", "#0b6a9c", "#edf5f9", "#bf5000", "#ffffff"),
    Theme("dark", "#e6edf3", "#9aa4ae", "#6e7781", "#58b5e3", "#10293a", "#f0883e", "#0d1117"),
)


def text(x: float, y: float, words: str, colour: str, size: int = 14, more: str = "") -> str:
    return f'<text x="{x}" y="{y}" font-size="{size}" fill="{colour}" {more}>{words}</text>'


def left_of(l: int) -> float:
    """Return where the box of layer l starts; the first layer is 1."""
    return LEFT + (l - 1) * (BOX + GAP)


def dropped_box(l: int, y: float, words: str, theme: Theme) -> Iterator[str]:
    x = left_of(l)
    yield (
        f'<rect x="{x}" y="{y - TALL / 2}" width="{BOX}" height="{TALL}" rx="7" fill="none" stroke="{theme.orange}" '
        'stroke-dasharray="3 3"/>'
    )
    yield text(x + BOX / 2, y + 5, words, theme.orange, 15, 'text-anchor="middle" text-decoration="line-through"')


def box(first: int, last: int, y: float, words: str, theme: Theme, *, merged: bool = False) -> Iterator[str]:
    x, end = left_of(first), left_of(last) + BOX
    fill, stroke = (theme.faint, theme.blue) if merged else ("none", theme.ink)
    yield (
        f'<rect x="{x}" y="{y - TALL / 2}" width="{end - x}" height="{TALL}" rx="7" fill="{fill}" stroke="{stroke}" '
        f'stroke-width="{2 if merged else 1.2}"/>'
    )
    weight = 'font-weight="600" text-anchor="middle"' if merged else 'text-anchor="middle"'
    yield text((x + end) / 2, y + 5, words, theme.blue if merged else theme.ink, 15, weight)


def activation(l: int, y: float, theme: Theme, *, removed: bool = False) -> Iterator[str]:
    """Yield the activation after layer l."""
    x = left_of(l) + BOX + GAP / 2
    if removed:
        yield f'<circle cx="{x}" cy="{y}" r="11" fill="none" stroke="{theme.orange}" stroke-dasharray="3 3"/>'
        yield text(x, y + 4, "\u03c3", theme.orange, 13, 'text-anchor="middle" text-decoration="line-through"')
    else:
        yield f'<circle cx="{x}" cy="{y}" r="11" fill="{theme.blue}"/>'
        yield text(x, y + 4, "\u03c3", theme.on_blue, 13, 'text-anchor="middle"')


def wires(y: float, theme: Theme, ends: list[tuple[int, int]]) -> Iterator[str]:
    """Yield the lines between the boxes, each of which reaches from one layer to another."""
    stops = [LEFT - 22, *(x for first, last in ends for x in (left_of(first), left_of(last) + BOX)), WIDTH - 8]
    for start, end in zip(stops[::2], stops[1::2], strict=True):
        yield f'<line x1="{start}" x2="{end}" y1="{y}" y2="{y}" stroke="{theme.line}" stroke-width="2"/>'


def label(y: float, title: str, remark: str, theme: Theme) -> Iterator[str]:
    yield text(8, y - 3, title, theme.ink, 15, 'font-weight="600"')
    yield text(8, y + 17, remark, theme.muted, 13)


def drawn(theme: Theme) -> Iterator[str]:
    deep, removed, merged = ROWS
    yield from label(deep, "A deep network", f"{len(KERNELS)} convolutions", theme)
    yield from label(removed, "Remove activations", "and layers, if you allow it", theme)
    yield from label(merged, "Merge convolutions", "left in a row: 2 convolutions", theme)
    single = [(l, l) for l in range(1, len(KERNELS) + 1)]
    for y in (deep, removed):
        yield from wires(y, theme, single)
        for l, kernel in enumerate(KERNELS, 1):
            yield from (
                box(l, l, y, kernel, theme) if (y, l) != (removed, DROPPED) else dropped_box(l, y, kernel, theme)
            )
            if l < len(KERNELS):
                yield from activation(l, y, theme, removed=y == removed and l != KEPT)
    yield from wires(merged, theme, [(1, KEPT), (KEPT + 1, DROPPED - 1)])
    yield from box(1, KEPT, merged, "3\u00d73", theme, merged=True)
    yield from box(KEPT + 1, DROPPED - 1, merged, "3\u00d73", theme, merged=True)
    yield from activation(KEPT, merged, theme)
    yield text(
        WIDTH / 2, HEIGHT - 14,
        "Chosen for your latency budget from two measured tables: "
        "how fast each merged block is, and how much accuracy it costs.",
        theme.muted, 14, 'text-anchor="middle"',
    )  # fmt: skip


def picture(theme: Theme) -> str:
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
            f'height="{HEIGHT}" font-family="system-ui, Segoe UI, DejaVu Sans, sans-serif" role="img">',
            f"<title>{TITLE}</title>",
            *drawn(theme),
            "</svg>\n",
        )
    )


if __name__ == "__main__":
    for each in THEMES:
        Path(__file__).with_name(f"idea-{each.name}.svg").write_text(picture(each), encoding="utf-8")
