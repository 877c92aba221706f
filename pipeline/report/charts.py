"""Charts as inline SVG: curves over steps, and an interval against its bounds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from pipeline.report.wording import number, signed
from pipeline.spec.html import Html, el

Points: TypeAlias = Sequence[tuple[float, float]]

WIDTH, HEIGHT = 480, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 12, 30
_MOST_POINTS = 300  # more cannot be told apart at this width


@dataclass(frozen=True)
class Series:
    name: str
    points: Points
    style: str  # CSS class of the stroke
    dots: bool = False
    smooth: bool = False  # draw the values faintly and their running mean over them


@dataclass(frozen=True)
class Axis:
    """A linear scale from values to pixels."""

    low: float
    high: float
    start: float
    stop: float

    def at(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.stop - self.start)


def line_chart(title: str, series: Sequence[Series], mark: tuple[float, str] | None = None) -> Html | None:
    """Curves over the optimizer step; `mark` is a labelled vertical line. None when there is nothing to draw."""
    drawn = [Series(s.name, thin(s.points), s.style, s.dots, s.smooth) for s in series if s.points]
    if not drawn:
        return None
    x, y = _axes([point for line in drawn for point in line.points])
    parts = [_grid(x, y), _mark(x, *mark) if mark else None, [_curve(line, x, y) for line in drawn]]
    label = f"{title}: {', '.join(line.name for line in drawn)} by optimizer step"
    picture = el("svg", parts, viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", aria_label=label)
    legend = [el("span", el("i", class_=line.style), line.name) for line in drawn]
    return el("figure", el("figcaption", el("b", title), el("span", legend, class_="legend")), picture)


def interval_chart(low: float, estimate: float, high: float, margin: float) -> Html:
    """The difference's interval; where its lower end may not lie is shaded."""
    reach = [low, high, -margin, 0.0]
    pad = (max(reach) - min(reach) or 0.01) * 0.18
    x = Axis(min(reach) - pad, max(reach) + pad, 16, WIDTH * 1.5 - 16)
    bound, zero, a, b, centre = (x.at(value) for value in (-margin, 0.0, low, high, estimate))
    parts = [
        el("rect", x=0, y=26, width=_px(bound), height=84, class_="forbidden"),
        el("line", x1=_px(bound), x2=_px(bound), y1=26, y2=110, class_="bound"),
        el("line", x1=_px(zero), x2=_px(zero), y1=26, y2=110, class_="zero") if margin else None,
        el("line", x1=_px(a), x2=_px(b), y1=68, y2=68, class_="interval"),
        [el("line", x1=_px(end), x2=_px(end), y1=56, y2=80, class_="cap") for end in (a, b)],
        el("circle", cx=_px(centre), cy=68, r=8, class_="estimate"),
        _label(centre, 48, signed(estimate), "value"),
        _label(bound, 18, f"margin {signed(-margin)}" if margin else "0", "bound-label"),
        _label(zero, 128, "equal to baseline", "tick") if margin else None,
    ]
    text = f"difference {signed(estimate)}, interval {signed(low)} to {signed(high)}, margin {signed(-margin)}"
    return el("svg", parts, viewBox=f"0 0 {WIDTH * 1.5:.0f} 138", role="img", aria_label=text, class_="wide")


def thin(points: Points) -> Points:
    """At most a few hundred points: means of equal runs, the last point as it is."""
    if len(points) <= _MOST_POINTS:
        return points
    run = math.ceil(len(points) / _MOST_POINTS)
    runs = [points[start : start + run] for start in range(0, len(points) - 1, run)]
    return [(sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)) for part in runs] + [points[-1]]


def ticks(low: float, high: float, about: int = 4) -> list[float]:
    """Round values within the range: steps of 1, 2 or 5 times a power of ten."""
    rough = (high - low) / about
    power = 10 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [i * step for i in range(first, last + 1)]


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


def _grid(x: Axis, y: Axis) -> list[Html]:
    lines = []
    for value in ticks(y.low, y.high):
        at = y.at(value)
        lines += [
            el("line", x1=_LEFT, x2=WIDTH - _RIGHT, y1=_px(at), y2=_px(at), class_="grid"),
            el("text", _tick(value), x=_LEFT - 8, y=_px(at + 4), class_="tick left"),
        ]
    whole = [value for value in ticks(x.low, x.high) if value == int(value)]
    lines += [_label(x.at(value), HEIGHT - 8, _tick(value), "tick") for value in whole]
    return lines


def _mark(x: Axis, at: float, text: str) -> list[Html]:
    place = x.at(min(max(at, x.low), x.high))
    side = "end" if place > WIDTH / 2 else "start"
    shift = -6 if side == "end" else 6
    return [
        el("line", x1=_px(place), x2=_px(place), y1=_TOP, y2=HEIGHT - _BOTTOM, class_="mark"),
        el("text", text, x=_px(place + shift), y=_TOP + 12, class_=f"tick {side}") if text else Html(),
    ]


def _curve(line: Series, x: Axis, y: Axis) -> list[Html]:
    parts = [_path(line.points, x, y, f"curve {line.style}" + (" faint" if line.smooth else ""))]
    if line.smooth:
        parts.append(_path(_running_mean(line.points), x, y, f"curve {line.style}"))
    if line.dots:
        for step, value in line.points:
            note = el("title", f"{line.name} {number(value)} at step {step:.0f}")
            parts.append(el("circle", note, cx=_px(x.at(step)), cy=_px(y.at(value)), r=3.2, class_=f"dot {line.style}"))
    return parts


def _path(points: Points, x: Axis, y: Axis, style: str) -> Html:
    path = "M" + "L".join(f"{_px(x.at(a))} {_px(y.at(b))}" for a, b in points)
    return el("path", d=path, class_=style)


def _running_mean(points: Points) -> Points:
    """Centred, so that it does not lag behind a falling loss."""
    reach = len(points) // 40
    smoothed = []
    for i, (step, _) in enumerate(points):
        around = [value for _, value in points[max(0, i - reach) : i + reach + 1]]
        smoothed.append((step, sum(around) / len(around)))
    return smoothed


def _label(at: float, y: float, text: str, style: str) -> Html:
    return el("text", text, x=_px(at), y=y, class_=style)


def _tick(value: float) -> str:
    if abs(value) >= 10_000:
        return f"{value / 1000:g}k"
    return f"{value:.4g}".replace("-", "−")


def _px(value: float) -> str:
    return f"{value:.1f}"
