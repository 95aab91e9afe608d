"""HTML by small functions. Text is escaped unless it is Markup already, so a name from a model is never a tag."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Sequence
from typing import Any


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def escape(text: str) -> Markup:
    return text if isinstance(text, Markup) else Markup(html.escape(text, quote=True))


def element(tag: str, *content: str, **attributes: str) -> Markup:
    """<tag ...>content</tag>. `class_` is class, and an underscore inside a name is a hyphen."""
    given = "".join(f' {_attribute(name)}="{html.escape(value)}"' for name, value in attributes.items())
    return Markup(f"<{tag}{given}>{joined(content)}</{tag}>")


def joined(content: Iterable[str]) -> Markup:
    return Markup("".join(map(escape, content)))


def paragraph(*content: str, **attributes: str) -> Markup:
    return element("p", *content, **attributes)


def bullets(items: Iterable[str]) -> Markup:
    return element("ul", *(element("li", item) for item in items))


def table(caption: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> Markup:
    """A table whose first column names its row. It scrolls by itself where it is wider than the page."""
    head = element("tr", *(element("th", cell, scope="col") for cell in header))
    body = (
        element("tr", element("th", row[0], scope="row"), *(element("td", cell) for cell in row[1:])) for row in rows
    )
    whole = element("table", element("caption", caption), element("thead", head), element("tbody", *body))
    # A region that scrolls must take the keyboard's focus, or nobody without a mouse can scroll it.
    return element("div", whole, class_="scroll", role="region", aria_label=caption, tabindex="0")


def details(summary: str, *content: str) -> Markup:
    return element("details", element("summary", summary), *content)


def figure(name: str, alternative: str, caption: str, *, size: str = "wide") -> Markup:
    """The place of a plot. `alternative` is what a screen reader says in its stead."""
    plot = element("div", id=f"plot-{name}", class_=f"plot {size}", role="img", aria_label=alternative)
    return element("figure", plot, element("figcaption", caption))


def selector(name: str, label: str, options: Iterable[str]) -> Markup:
    """A list to choose which of several figures a place shows."""
    choices = (element("option", text, value=str(n)) for n, text in enumerate(options))
    which = Markup(f'<select id="select-{name}">{joined(choices)}</select>')
    return element("p", Markup(f'<label for="select-{name}">{escape(label)}</label> {which}'), class_="choice")


def embedded(data: Any) -> Markup:
    """JSON for a script element: no character of it can end the element or start a comment in it."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def _attribute(name: str) -> str:
    return name.rstrip("_").replace("_", "-")
