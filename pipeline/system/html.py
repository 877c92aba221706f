"""HTML elements that escape everything which is not already `Html`, and numbers formatted for people."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from typing import TypeAlias

_VOID = {"meta", "link", "br", "img", "input"}


class Html(str):
    """Text that is markup already."""

    __slots__ = ()

    def __html__(self) -> Html:
        """Jinja does not escape it again."""
        return self


Child: TypeAlias = "str | int | float | Iterable[Child] | None"


def el(name: str, /, *children: Child, **attributes: object) -> Html:
    """Return an element, as in `el("td", 3, class_="number")`; None is left out, iterables are flattened."""
    text = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in _VOID:
        return Html(f"<{name}{text}>")
    return Html(f"<{name}{text}>{flat(*children)}</{name}>")


def flat(*children: Child) -> Html:
    return Html("".join(_text(child) for child in children))


def table(head: Sequence[str], rows: Iterable[Sequence[Child]], numbers: bool = True) -> Html:
    """Return a table whose first column names the row; the others are numbers unless `numbers` is false."""
    kind = "number" if numbers else None
    body = [el("tr", el("th", row[0], scope="row"), [el("td", cell, class_=kind) for cell in row[1:]]) for row in rows]
    first_column, *other_columns = head
    names = [el("th", name, scope="col", class_=kind) for name in other_columns]
    heading = el("tr", el("th", first_column, scope="col"), names)
    return el("div", el("table", el("thead", heading), el("tbody", body)), class_="scroll")


def _text(child: Child) -> str:
    if child is None:
        return ""
    if isinstance(child, Html):
        return child
    if isinstance(child, str | int | float):
        return html.escape(str(child))
    return "".join(_text(inner) for inner in child)


MISSING = "–"
_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def number(value: float | None, digits: int = 4) -> str:
    """Format with so many significant digits, thousands separators, and very small numbers as a power of ten."""
    if value is None or not math.isfinite(value):
        return MISSING
    if value < 0:
        return f"−{number(-value, digits)}"
    if value == 0 or (float(value).is_integer() and value < 1e15):
        return f"{int(value):,}"
    if value < 1e-4 or value >= 1e15:
        return _power_of_ten(value, digits)
    return f"{value:,.0f}" if value >= 1000 else f"{value:.{digits}g}"


def signed(value: float) -> str:
    return f"+{number(value)}" if value > 0 else number(value + 0.0)


def percent(value: float | None) -> str:
    return MISSING if value is None else f"{value:.1%}"


def seconds(value: float | None) -> str:
    if value is None:
        return MISSING
    if value < 1:
        return f"{value * 1000:.0f} ms"
    if value < 60:
        return f"{value:.1f} s"
    minutes, remaining_seconds = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {remaining_seconds:02d} s"


def size(count: float | None) -> str:
    if count is None:
        return MISSING
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            break
        count /= 1024
    return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"


def short(digest: str) -> str:
    """The first twelve digits of a digest, with or without its algorithm."""
    return digest.rpartition(":")[2][:12]


def _power_of_ten(value: float, digits: int) -> str:
    mantissa, _, exponent = f"{value:.{digits - 1}e}".partition("e")
    short_mantissa = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
    return f"{short_mantissa}×10{str(int(exponent)).translate(_SUPERSCRIPT)}"
