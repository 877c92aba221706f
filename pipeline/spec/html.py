"""HTML by construction: whatever is not already `Html` is escaped, so no name can break the page."""

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
    """`el("td", 3, class_="number")`: None children and attributes are left out, iterables laid flat."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in _VOID:
        return Html(f"<{name}{written}>")
    return Html(f"<{name}{written}>{flat(*children)}</{name}>")


def flat(*children: Child) -> Html:
    return Html("".join(_text(child) for child in children))


def table(
    head: Sequence[str], rows: Iterable[Sequence[Child]], numbers: bool = True, words: Sequence[int] = ()
) -> Html:
    """The first column names the row; the others are numbers unless said otherwise, or but for those in `words`."""

    def kind(place: int) -> str | None:
        return "number" if numbers and place not in words else None

    body = [
        el("tr", el("th", row[0], scope="row"), [el("td", cell, class_=kind(i)) for i, cell in enumerate(row) if i])
        for row in rows
    ]
    first, *others = head
    names = [el("th", name, scope="col", class_=kind(i)) for i, name in enumerate(others, 1)]
    heading = el("tr", el("th", first, scope="col"), names)
    return el("div", el("table", el("thead", heading), el("tbody", body)), class_="scroll")


def pairs(rows: Iterable[tuple[str, Child]]) -> Html:
    """Names with their values; those without a value are left out."""
    return el("dl", [el("div", el("dt", name), el("dd", value)) for name, value in rows if value])


def _text(child: Child) -> str:
    if child is None:
        return ""
    if isinstance(child, Html):
        return child
    if isinstance(child, str | int | float):
        return html.escape(str(child))
    return "".join(_text(inner) for inner in child)
