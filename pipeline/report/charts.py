"""Curves over optimizer steps, as inline SVG."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from pipeline.report.scale import Axis, drawing, label, px, tick_text, ticks
from pipeline.report.scale import line as straight
from pipeline.spec.html import Html, el
from pipeline.spec.wording import number

Points: TypeAlias = Sequence[tuple[float, float]]

WIDTH, HEIGHT = 480, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 12, 30
_MOST_POINTS = 300  # more cannot be told apart at this width


@dataclass(frozen=True)
class Series:
    name: str
    points: Points
    style: str  # CSS class of the stroke
    dots: bool = False
    smooth: bool = False  # draw the values faintly and their running mean over them
    other: bool = False  # of the run this one is compared with

    @property
    def kind(self) -> str:
        return f"{self.style} other" if self.other else self.style


def line_chart(title: str, series: Sequence[Series], mark: tuple[float, str] | None = None) -> Html | None:
    """Curves over the optimizer step; `mark` is a labelled vertical line. None when there is nothing to draw."""
    drawn = [replace(one, points=thin(one.points)) for one in series if one.points]
    if not drawn:
        return None
    x, y = _axes([point for line in drawn for point in line.points])
    parts = [_grid(x, y), _mark(x, *mark) if mark else None, [_curve(line, x, y) for line in drawn]]
    ends = "; ".join(f"{line.name} ends at {number(line.points[-1][1])}" for line in drawn)
    text = f"{title}: {', '.join(line.name for line in drawn)} by optimizer step. {ends}."
    ordered = sorted(drawn, key=lambda line: line.other)  # this run is drawn last, above, and named first
    legend = [el("span", el("i", class_=line.kind), line.name) for line in ordered]
    caption = el("figcaption", el("b", title), el("span", legend, class_="legend"))
    return el("figure", caption, drawing(title, text, parts, WIDTH, HEIGHT))


def thin(points: Points) -> Points:
    """At most a few hundred points: means of equal runs, the last point as it is."""
    if len(points) <= _MOST_POINTS:
        return points
    run = math.ceil(len(points) / _MOST_POINTS)
    runs = [points[start : start + run] for start in range(0, len(points) - 1, run)]
    return [(sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)) for part in runs] + [points[-1]]


def _axes(points: Points) -> tuple[Axis, Axis]:
    xs, ys = [x for x, _ in points], [y for _, y in points]
    low, high = min(ys), max(ys)
    pad = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    x_low, x_high = min(xs), max(xs)
    bottom = 0.0 if 0 <= low < high * 0.5 else low - pad
    return (
        Axis(x_low, x_high if x_high > x_low else x_low + 1, _LEFT, WIDTH - _RIGHT),
        Axis(bottom, high + pad, HEIGHT - _BOTTOM, _TOP),
    )


def _grid(x: Axis, y: Axis) -> Iterator[Html]:
    for value in ticks(y.low, y.high):
        at = y.at(value)
        yield straight(_LEFT, at, WIDTH - _RIGHT, at, "grid")
        yield label(_LEFT - 8, at + 4, tick_text(value), "tick left")
    whole = [value for value in ticks(x.low, x.high) if value == int(value)]
    yield from (label(x.at(value), HEIGHT - 8, tick_text(value), "tick") for value in whole)


def _mark(x: Axis, at: float, text: str) -> list[Html]:
    place = x.at(min(max(at, x.low), x.high))
    side = "end" if place > WIDTH / 2 else "start"
    shift = -6 if side == "end" else 6
    return [
        straight(place, _TOP, place, HEIGHT - _BOTTOM, "mark"),
        label(place + shift, _TOP + 12, text, f"tick {side}") if text else Html(),
    ]


def _curve(line: Series, x: Axis, y: Axis) -> list[Html]:
    parts = [_path(line.points, x, y, f"curve {line.kind}" + (" faint" if line.smooth else ""))]
    if line.smooth:
        parts.append(_path(_running_mean(line.points), x, y, f"curve {line.kind}"))
    if line.dots:
        for step, value in line.points:
            note = el("title", f"{line.name} {number(value)} at step {step:.0f}")
            parts.append(_dot(line, note, x.at(step), y.at(value)))
    return parts


def _dot(line: Series, note: Html, x: float, y: float) -> Html:
    """Round, or square for the other run: told apart without colours."""
    if line.other:
        return el("rect", note, x=px(x - 2.6), y=px(y - 2.6), width=5.2, height=5.2, class_=f"dot {line.kind}")
    return el("circle", note, cx=px(x), cy=px(y), r=2.8, class_=f"dot {line.kind}")


def _path(points: Points, x: Axis, y: Axis, style: str) -> Html:
    path = "M" + "L".join(f"{px(x.at(a))} {px(y.at(b))}" for a, b in points)
    return el("path", d=path, class_=style)


def _running_mean(points: Points) -> Points:
    """Centred, so that it does not lag behind a falling loss."""
    reach = len(points) // 40
    smoothed = []
    for i, (step, _) in enumerate(points):
        around = [value for _, value in points[max(0, i - reach) : i + reach + 1]]
        smoothed.append((step, sum(around) / len(around)))
    return smoothed
