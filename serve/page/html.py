"""HTML elements that escape everything which is not already `Html`; a template engine would load in every service."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import TypeAlias

_VOID = {"meta", "link", "br", "img", "input"}


class Html(str):
    """Text that is markup already."""

    __slots__ = ()


Child: TypeAlias = "str | int | float | Iterable[Child] | None"


def el(name: str, /, *children: Child, **attributes: object) -> Html:
    """Return an element, as in `el("td", 3, class_="number")`; None is left out, iterables are flattened."""
    given = {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items() if value is not None}
    text = "".join(f' {key}="{html.escape(str(value))}"' for key, value in given.items())
    if name in _VOID:
        return Html(f"<{name}{text}>")
    return Html(f"<{name}{text}>{flat(*children)}</{name}>")


def flat(*children: Child) -> Html:
    return Html("".join(_text(child) for child in children))


def table(head: Sequence[str], rows: Iterable[Sequence[Child]]) -> Html:
    """Return a table whose first column names the row."""
    names = [el("th", name, scope="col") for name in head]
    body = [el("tr", el("th", row[0], scope="row"), [el("td", cell) for cell in row[1:]]) for row in rows]
    return el("div", el("table", el("thead", el("tr", names)), el("tbody", body)), class_="scroll")


def _text(child: Child) -> str:
    if child is None:
        return ""
    if isinstance(child, Html):
        return child
    if isinstance(child, str | int | float):
        return html.escape(str(child))
    return "".join(_text(inner) for inner in child)
