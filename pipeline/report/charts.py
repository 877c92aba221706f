"""Charts as plain shapes: axes with titles, curves over optimizer steps, and confidence intervals of differences.

`templates/charts.html` writes them as SVG. Every chart has a title and a description in words, so that it can be read
without seeing it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeAlias

from pipeline.contract.results import is_number
from pipeline.system.wording import MISSING, number, signed

Points: TypeAlias = Sequence[tuple[float, float]]
Legend: TypeAlias = Sequence[tuple[str, str]]  # names with the class of their stroke

WIDTH, HEIGHT = 480, 260
_MAX_POINTS = 300  # more are not distinguishable at this width
_STEP = "optimizer step"
RUN_STYLES = ("one", "two", "three", "four", "five")  # of this run and those it is compared with


@dataclass(frozen=True)
class Line:
    tag: ClassVar = "line"
    x1: float
    y1: float
    x2: float
    y2: float
    style: str  # its CSS class, as of all shapes


@dataclass(frozen=True)
class Label:
    tag: ClassVar = "text"
    x: float
    y: float
    text: str
    style: str
    upwards: bool = False  # is read from the bottom to the top


@dataclass(frozen=True)
class Path:
    tag: ClassVar = "path"
    d: str
    style: str


@dataclass(frozen=True)
class Circle:
    tag: ClassVar = "circle"
    x: float
    y: float
    r: float
    style: str
    tooltip: str = ""


@dataclass(frozen=True)
class Rectangle:
    tag: ClassVar = "rect"
    x: float
    y: float
    width: float
    height: float
    style: str
    tooltip: str = ""
    radius: float = 0.0  # of its corners


@dataclass(frozen=True)
class Picture:
    tag: ClassVar = "image"
    png: str  # in base64
    width: float
    height: float


@dataclass(frozen=True)
class Group:
    tag: ClassVar = "g"
    shapes: Sequence[Shape]
    style: str = ""
    tooltip: str = ""


Shape: TypeAlias = Line | Label | Path | Circle | Rectangle | Picture | Group


@dataclass(frozen=True)
class Chart:
    title: str
    text: str  # what it shows, in words
    shapes: Sequence[Shape]
    width: float
    height: float
    style: str = ""
    caption: str = ""  # of its figure; empty: the title
    legend: Legend = ()
    note: str = ""


@dataclass(frozen=True)
class Series:
    name: str
    points: Points
    style: str  # CSS class of the stroke
    dots: bool = False
    smooth: bool = False  # draw the values faintly and their running mean over them
    place: int = 0  # of its run among those compared; the first one's lines are solid

    @property
    def kind(self) -> str:
        return f"{self.style} other dash-{self.place}" if self.place else self.style


def line_chart(
    title: str, series: Sequence[Series], y_title: str, mark: tuple[float, str] | None = None, x_title: str = _STEP
) -> Chart | None:
    """Draw curves by step or horizon; `mark` is a labelled vertical line. None if there are no points."""
    lines = [replace(line, points=thin(line.points)) for line in series if line.points]
    if not lines:
        return None
    plot = _plot([point for line in lines for point in line.points])
    named = sorted(lines, key=lambda line: line.place)
    bottom_up = sorted(lines, key=lambda line: -line.place)  # the first run is drawn last
    shapes = [
        *plot.frame(x_title, y_title, whole=True),
        *(_mark(plot, *mark) if mark else ()),
        *(shape for line in bottom_up for shape in _curve(line, plot)),
    ]
    ends = "; ".join(f"{line.name} ends at {number(line.points[-1][1])}" for line in named)
    text = f"{title}: {', '.join(line.name for line in named)} by {x_title}. {ends}."
    legend = [(line.name, line.kind) for line in named] if len(named) > 1 else []
    return plot.chart(title, text, shapes, legend=legend)


def thin(points: Points) -> Points:
    """Return at most a few hundred points: means of equal runs, and the last point unchanged."""
    if len(points) <= _MAX_POINTS:
        return points
    length = math.ceil(len(points) / _MAX_POINTS)
    runs = [points[start : start + length] for start in range(0, len(points) - 1, length)]
    return [(sum(x for x, _ in run) / len(run), sum(y for _, y in run) / len(run)) for run in runs] + [points[-1]]


def _plot(points: Points) -> Plot:
    xs, ys = [x for x, _ in points], [y for _, y in points]
    low, high = min(ys), max(ys)
    pad = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    x_low, x_high = min(xs), max(xs)
    bottom = 0.0 if 0 <= low < high * 0.5 else low - pad
    return make_plot((x_low, x_high if x_high > x_low else x_low + 1), (bottom, high + pad))


def _mark(plot: Plot, step: float, text: str) -> Iterator[Shape]:
    x = plot.x.at(min(max(step, plot.x.low), plot.x.high))
    yield Line(x, plot.y.stop, x, plot.y.start, "mark")
    if text:
        is_right = x > plot.width / 2
        yield Label(x + (-6 if is_right else 6), plot.y.stop + 12, text, f"tick {'end' if is_right else 'start'}")


def _curve(line: Series, plot: Plot) -> Iterator[Shape]:
    yield plot.path(line.points, f"curve {line.kind}" + (" faint" if line.smooth else ""))
    if line.smooth:
        yield plot.path(_running_mean(line.points), f"curve {line.kind}")
    for step, value in line.points if line.dots else ():
        x, y, tooltip = plot.x.at(step), plot.y.at(value), f"{line.name} {number(value)} at step {step:.0f}"
        if line.place:  # square for other runs, so that they differ without colours
            yield Rectangle(x - 2.6, y - 2.6, 5.2, 5.2, f"dot {line.kind}", tooltip)
        else:
            yield Circle(x, y, 2.8, f"dot {line.kind}", tooltip)


def _running_mean(points: Points) -> Points:
    """Return the centred running mean, which does not lag behind a falling loss."""
    radius = len(points) // 40
    smoothed = []
    for i, (step, _) in enumerate(points):
        window = [value for _, value in points[max(0, i - radius) : i + radius + 1]]
        smoothed.append((step, sum(window) / len(window)))
    return smoothed


@dataclass(frozen=True)
class Axis:
    """A linear scale from values to pixels."""

    low: float
    high: float
    start: float
    stop: float

    def at(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.stop - self.start)


@dataclass(frozen=True)
class Plot:
    """The area of a chart with its two scales."""

    x: Axis
    y: Axis
    width: float
    height: float

    def frame(self, x_title: str, y_title: str, whole: bool = False, x_ticks: bool = True) -> Iterator[Shape]:
        """Draw the grid, the numbers and the titles of both axes; `whole` leaves out fractions on the x axis."""
        x, y = self.x, self.y
        for value in ticks(y.low, y.high, 5):
            yield Line(x.start, y.at(value), x.stop, y.at(value), "grid")
            yield Label(x.start - 8, y.at(value) + 4, tick_text(value), "tick left")
        for value in ticks(x.low, x.high, 5) if x_ticks else ():
            if not whole or value == int(value):
                yield Label(x.at(value), y.start + 17, tick_text(value), "tick")
        yield Line(x.start, y.start, x.stop, y.start, "axis")
        yield Label((x.start + x.stop) / 2, self.height - 6, x_title, "axis-title")
        yield Label(12, (y.start + y.stop) / 2, y_title, "axis-title", upwards=True)

    def path(self, points: Points, style: str) -> Path:
        return Path("M" + "L".join(f"{px(self.x.at(a))} {px(self.y.at(b))}" for a, b in points), style)

    def chart(
        self,
        title: str,
        text: str,
        shapes: Sequence[Shape],
        style: str = "",
        *,
        caption: str = "",
        legend: Legend = (),
        note: str = "",
    ) -> Chart:
        return Chart(title, text, shapes, self.width, self.height, style, caption, legend, note)

    def diagonal(self) -> Line:
        return Line(self.x.start, self.y.start, self.x.stop, self.y.stop, "zero")

    def bar(
        self, low: float, high: float, value: float, style: str, tooltip: str, place: int = 0, count: int = 1
    ) -> Iterator[Rectangle]:
        """Draw a value between two places of the x axis, if it is not zero; `place` of `count` bars side by side."""
        if not value:
            return
        gap = 0.06 if count > 1 else 0.0
        left = self.x.at(low + (high - low) * (place + gap) / count) + 0.5
        right = self.x.at(low + (high - low) * (place + 1 - gap) / count) - 0.5
        top = min(self.y.at(value), self.y.start - 0.8)
        yield Rectangle(left, top, max(right - left, 0.5), self.y.start - top, f"bin {style}", tooltip)


_PLOT_LEFT, _PLOT_RIGHT, _PLOT_TOP, _PLOT_BOTTOM = 76, 12, 12, 46


def make_plot(
    x: tuple[float, float],
    y: tuple[float, float],
    width: float = WIDTH,
    height: float = HEIGHT,
    left: float = _PLOT_LEFT,
) -> Plot:
    """Return a plot of these ranges, with room for the numbers and titles of its axes."""
    return Plot(
        Axis(*x, left, width - _PLOT_RIGHT), Axis(*y, height - _PLOT_BOTTOM, _PLOT_TOP), width=width, height=height
    )


def ticks(low: float, high: float, about: int = 4) -> list[float]:
    """Round values within the range: steps of 1, 2 or 5 times a power of ten."""
    exact_step = (high - low) / about
    power = 10 ** math.floor(math.log10(exact_step))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= exact_step * 0.999)
    first_multiple, last_multiple = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [i * step for i in range(first_multiple, last_multiple + 1)]


def tick_text(value: float) -> str:
    for least, divisor, unit in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(value) >= least:
            return f"{value / divisor:g}{unit}".replace("-", "−")
    return number(value)


def px(value: float) -> str:
    return f"{value:.1f}"


_WIDTH, _HEIGHT = 720, 146
_INTERVAL_TOP, _FLOOR, _MIDDLE = 26, 92, 60
_SMALL_WIDTH, _SMALL_HEIGHT = 150, 18


@dataclass(frozen=True)
class Range:
    """A difference with its confidence interval."""

    estimate: float
    low: float
    high: float


def parse_range(body: Any) -> Range | None:
    """Read an interval of verdict.json or variants.json; None if a number is missing."""
    if not isinstance(body, dict):
        return None
    numbers = [body.get(name) for name in ("estimate", "low", "high")]
    values = [value for value in numbers if is_number(value)]
    return Range(*values) if len(values) == len(numbers) else None


def interval_chart(difference: Range, bound: float, bound_text: str, equal_text: str, x_title: str) -> Chart:
    """Draw the interval of a difference; the side below `bound`, where its lower end must not lie, is shaded."""
    ends = [difference.low, difference.high, bound, 0.0]
    pad = (max(ends) - min(ends) or 0.01) * 0.16
    x = Axis(min(ends) - pad, max(ends) + pad, 12, _WIDTH - 12)
    edge, zero, center = x.at(bound), x.at(0.0), x.at(difference.estimate)
    shapes = [
        Rectangle(0, _INTERVAL_TOP, edge, _FLOOR - _INTERVAL_TOP, "forbidden"),
        Line(edge, _INTERVAL_TOP, edge, _FLOOR, "bound"),
        *([Line(zero, _INTERVAL_TOP, zero, _FLOOR, "zero")] if bound else ()),
        *_whisker(x, difference, _MIDDLE, 10, 6),
        Label(center, _MIDDLE - 16, signed(difference.estimate), "value"),
        Label(min(max(edge, 60), _WIDTH - 60), 16, bound_text, "bound-label"),
        Line(12, _FLOOR, _WIDTH - 12, _FLOOR, "axis"),
        *(shape for value in ticks(x.low, x.high, 6) for shape in _scale_mark(x.at(value), value)),
        Label(min(max(zero, 80), _WIDTH - 80), 124, equal_text, "tick foot"),
        Label(_WIDTH / 2, 142, x_title, "axis-title"),
    ]
    text = (
        f"difference {signed(difference.estimate)}, interval {signed(difference.low)} to {signed(difference.high)}; "
        f"its lower end must lie above {signed(bound)}"
    )
    return Chart("The difference and its interval", text, shapes, _WIDTH, _HEIGHT, "wide")


def shared_axis(ranges: Sequence[Range | None]) -> Axis | None:
    """Return one scale for all rows of a table; zero is on it."""
    ends = [end for item in ranges if item for end in (item.low, item.high)]
    if not ends:
        return None
    low, high = min(*ends, 0.0), max(*ends, 0.0)
    pad = (high - low) * 0.05 or 0.01
    return Axis(low - pad, high + pad, 3, _SMALL_WIDTH - 3)


def small_interval(difference: Range | None, axis: Axis | None = None) -> Chart | None:
    """Draw an interval on an axis that rows share, or on its own."""
    x = axis or shared_axis([difference])
    if difference is None or x is None:
        return None
    zero, middle = x.at(0.0), _SMALL_HEIGHT / 2
    shapes = [Line(zero, 0, zero, _SMALL_HEIGHT, "zero"), *_whisker(x, difference, middle, 4, 3)]
    return Chart("Interval", interval_text(difference), shapes, _SMALL_WIDTH, _SMALL_HEIGHT, "small")


def interval_text(difference: Range | None) -> str:
    if difference is None:
        return MISSING
    if difference.low == difference.high:
        return signed(difference.estimate)
    return f"{signed(difference.estimate)} [{signed(difference.low)}, {signed(difference.high)}]"


def _whisker(x: Axis, difference: Range, y: float, cap: float, radius: float) -> Iterator[Shape]:
    low, high = x.at(difference.low), x.at(difference.high)
    yield Line(low, y, high, y, "interval")
    yield from (Line(end, y - cap, end, y + cap, "cap") for end in (low, high))
    yield Circle(x.at(difference.estimate), y, radius, "estimate")


def _scale_mark(x: float, value: float) -> Iterator[Shape]:
    yield Line(x, _FLOOR, x, _FLOOR + 4, "axis")
    yield Label(x, 108, f"{'+' if value > 0 else ''}{tick_text(value)}", "tick")
