"""Intervals drawn: the difference that decides against its bound, and a small one for a row of a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.report.scale import Axis, drawing, label, line, px, tick_text, ticks
from pipeline.spec.facts import is_number
from pipeline.spec.html import Html, el
from pipeline.spec.wording import signed

_WIDTH, _HEIGHT = 720, 128
_TOP, _FLOOR, _MIDDLE = 26, 92, 60
_SMALL_WIDTH, _SMALL_HEIGHT = 150, 18


@dataclass(frozen=True)
class Range:
    """A difference and how far off it may be."""

    estimate: float
    low: float
    high: float


def range_of(body: Any) -> Range | None:
    """As verdict.json and its like have it; None where a number is missing."""
    if not isinstance(body, dict):
        return None
    numbers = [body.get(name) for name in ("estimate", "low", "high")]
    known = [one for one in numbers if is_number(one)]
    return Range(*known) if len(known) == len(numbers) else None


def interval_chart(found: Range, bound: float, bound_text: str, equal_text: str) -> Html:
    """The difference's interval; where its lower end may not lie, below `bound`, is shaded."""
    reach = [found.low, found.high, bound, 0.0]
    pad = (max(reach) - min(reach) or 0.01) * 0.16
    x = Axis(min(reach) - pad, max(reach) + pad, 12, _WIDTH - 12)
    edge, low, centre, high = (x.at(value) for value in (bound, found.low, found.estimate, found.high))
    parts = [
        el("rect", x=0, y=_TOP, width=px(edge), height=_FLOOR - _TOP, class_="forbidden"),
        line(edge, _TOP, edge, _FLOOR, "bound"),
        line(x.at(0.0), _TOP, x.at(0.0), _FLOOR, "zero") if bound else None,
        _whisker(low, centre, high, _MIDDLE, 10, 6),
        label(centre, _MIDDLE - 16, signed(found.estimate), "value"),
        label(min(max(edge, 60), _WIDTH - 60), 16, bound_text, "bound-label"),
        line(12, _FLOOR, _WIDTH - 12, _FLOOR, "axis"),
        [
            (line(x.at(value), _FLOOR, x.at(value), _FLOOR + 4, "axis"), label(x.at(value), 108, _tick(value), "tick"))
            for value in ticks(x.low, x.high, 6)
        ],
        label(min(max(x.at(0.0), 80), _WIDTH - 80), 124, equal_text, "tick foot"),
    ]
    text = (
        f"difference {signed(found.estimate)}, interval {signed(found.low)} to {signed(found.high)}; "
        f"its lower end must lie above {signed(bound)}"
    )
    return drawing("The difference and its interval", text, parts, _WIDTH, _HEIGHT, "wide")


def shared_axis(ranges: Sequence[Range | None]) -> Axis | None:
    """One scale for all rows of a table, with zero on it."""
    ends = [end for one in ranges if one for end in (one.low, one.high)]
    if not ends:
        return None
    low, high = min(*ends, 0.0), max(*ends, 0.0)
    pad = (high - low) * 0.05 or 0.01
    return Axis(low - pad, high + pad, 3, _SMALL_WIDTH - 3)


def small_interval(found: Range | None, x: Axis | None) -> Html | None:
    if found is None or x is None:
        return None
    middle, zero = _SMALL_HEIGHT / 2, x.at(0.0)
    parts = [
        line(zero, 0, zero, _SMALL_HEIGHT, "zero"),
        _whisker(x.at(found.low), x.at(found.estimate), x.at(found.high), middle, 4, 3),
    ]
    return drawing("Interval", interval_text(found), parts, _SMALL_WIDTH, _SMALL_HEIGHT, "small")


def interval_text(found: Range | None) -> str:
    if found is None:
        return ""
    if found.low == found.high:
        return signed(found.estimate)
    return f"{signed(found.estimate)} [{signed(found.low)}, {signed(found.high)}]"


def _whisker(low: float, centre: float, high: float, y: float, cap: float, radius: float) -> list[Html]:
    ends = [line(end, y - cap, end, y + cap, "cap") for end in (low, high)]
    return [
        line(low, y, high, y, "interval"),
        *ends,
        el("circle", cx=px(centre), cy=px(y), r=radius, class_="estimate"),
    ]


def _tick(value: float) -> str:
    return f"{'+' if value > 1e-12 else ''}{tick_text(round(value, 10))}"
