"""Numbers, sizes, times and tables as people read them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import timedelta

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
    return f"{value:,.0f}" if value >= 10 ** (digits - 1) else f"{value:.{digits}g}"


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


def milliseconds(value: float | None) -> str:
    return MISSING if value is None else f"{number(value, 3)} ms"


def size(count: float | None) -> str:
    if count is None:
        return MISSING
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            break
        count /= 1024
    return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"


def age(value: timedelta) -> str:
    """Return the largest unit of an age, as in `3 h`."""
    total = max(0, int(value.total_seconds()))
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if total >= length:
            return f"{total // length} {unit}"
    return f"{total} s"


def clock(value: float) -> str:
    """Format seconds as 0:07, 12:34 or 1:02:03."""
    minutes, remaining_seconds = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{remaining_seconds:02d}" if hours else f"{minutes}:{remaining_seconds:02d}"


def short(digest: str) -> str:
    """The first twelve digits of a digest, with or without its algorithm."""
    return digest.rpartition(":")[2][:12]


def join_names(names: Sequence[str], most: int) -> str:
    """Join the first names, and count the rest."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def align(rows: Sequence[Sequence[str]], texts: int | None = None) -> list[str]:
    """Return the rows of a table as lines of aligned columns; those after the first `texts` are numbers.

    The last cell of a row that is shorter than the others may be longer than its column.
    """
    count = max(map(len, rows), default=0)
    widths = [
        max(len(row[i]) for row in rows if len(row) > i and (len(row) == count or len(row) > i + 1))
        for i in range(count)
    ]
    return ["  ".join(_aligned(row, widths, count if texts is None else texts)).rstrip() for row in rows]


def _aligned(row: Sequence[str], widths: Sequence[int], texts: int) -> list[str]:
    return [
        cell.ljust(width) if i < texts else cell.rjust(width)
        for i, (cell, width) in enumerate(zip(row, widths, strict=False))
    ]


def _power_of_ten(value: float, digits: int) -> str:
    mantissa, _, exponent = f"{value:.{digits - 1}e}".partition("e")
    short_mantissa = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
    return f"{short_mantissa}×10{str(int(exponent)).translate(_SUPERSCRIPT)}"
