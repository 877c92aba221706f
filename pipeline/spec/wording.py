"""Numbers as people read them."""

from __future__ import annotations

import math

MISSING = "–"
_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def number(value: float | None, digits: int = 4) -> str:
    """Plain where that is short, with thousands apart; a power of ten elsewhere."""
    if value is None or not math.isfinite(value):
        return MISSING
    if value < 0:
        return f"−{number(-value, digits)}"
    if value == 0 or (float(value).is_integer() and abs(value) < 1e15):
        return f"{int(value):,}"
    if abs(value) < 1e-3:
        return _power_of_ten(value)
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.{digits}g}" if abs(value) >= 1 else f"{value:.{digits}f}"


def signed(value: float) -> str:
    return f"{value:+.4f}".replace("-", "−") if value else "0"


def percent(value: float | None) -> str:
    return MISSING if value is None else f"{value:.1%}"


def seconds(value: float | None) -> str:
    if value is None:
        return MISSING
    if value < 1:
        return f"{value * 1000:.0f} ms"
    if value < 60:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


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


def _power_of_ten(value: float) -> str:
    digits, _, exponent = f"{value:.1e}".partition("e")
    return f"{digits}×10{str(int(exponent)).translate(_SUPERSCRIPT)}"
