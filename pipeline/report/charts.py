"""Charts as inline SVG: axes with titles, curves over optimizer steps, and confidence intervals of differences.

Every chart has a title and a description in words, so that it can be read without seeing it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from pipeline.contract.results import is_number
from pipeline.system.html import Child, Html, el, number, signed

Points: TypeAlias = Sequence[tuple[float, float]]

WIDTH, HEIGHT = 480, 260
_MAX_POINTS = 300  # more are not distinguishable at this width
RUN_STYLES = ("one", "two", "three", "four", "five")  # of this run and those it is compared with


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
    title: str, series: Sequence[Series], y_title: str, mark: tuple[float, str] | None = None
) -> Html | None:
    """Draw curves over the optimizer step; `mark` is a labelled vertical line. None if there are no points."""
    lines = [replace(line, points=thin(line.points)) for line in series if line.points]
    if not lines:
        return None
    plot = _plot([point for line in lines for point in line.points])
    lines.sort(key=lambda line: -line.place)  # the first run is drawn last, above the others
    parts = [
        plot.frame("optimizer step", y_title, whole=True),
        _mark(plot, *mark) if mark else None,
        [_curve(line, plot) for line in lines],
    ]
    named = sorted(lines, key=lambda line: line.place)
    ends = "; ".join(f"{line.name} ends at {number(line.points[-1][1])}" for line in named)
    text = f"{title}: {', '.join(line.name for line in named)} by optimizer step. {ends}."
    legend = [(line.name, line.kind) for line in named] if len(named) > 1 else []
    return figure(title, drawing(title, text, parts, plot.width, plot.height), legend)


def figure(title: str, chart: Html, legend: Sequence[tuple[str, str]] = (), note: str = "") -> Html:
    """Return a chart below its title and a legend of names with the class of their stroke."""
    keys = [el("span", el("i", class_=kind), name) for name, kind in legend]
    caption = el("figcaption", el("b", title), el("span", keys, note, class_="legend") if keys or note else None)
    return el("figure", caption, chart)


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


def _mark(plot: Plot, step: float, text: str) -> list[Html]:
    x = plot.x
    position = x.at(min(max(step, x.low), x.high))
    side = "end" if position > plot.width / 2 else "start"
    offset = -6 if side == "end" else 6
    return [
        svg_line(position, plot.y.stop, position, plot.y.start, "mark"),
        label(position + offset, plot.y.stop + 12, text, f"tick {side}") if text else Html(),
    ]


def _curve(line: Series, plot: Plot) -> list[Html]:
    parts = [plot.path(line.points, f"curve {line.kind}" + (" faint" if line.smooth else ""))]
    if line.smooth:
        parts.append(plot.path(_running_mean(line.points), f"curve {line.kind}"))
    if line.dots:
        for step, value in line.points:
            tooltip = el("title", f"{line.name} {number(value)} at step {step:.0f}")
            parts.append(_dot(line, tooltip, plot.x.at(step), plot.y.at(value)))
    return parts


def _dot(line: Series, tooltip: Html, x: float, y: float) -> Html:
    """Round, or square for other runs, so that they differ without colours."""
    if line.place:
        return el("rect", tooltip, x=px(x - 2.6), y=px(y - 2.6), width=5.2, height=5.2, class_=f"dot {line.kind}")
    return el("circle", tooltip, cx=px(x), cy=px(y), r=2.8, class_=f"dot {line.kind}")


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

    def frame(self, x_title: str, y_title: str, whole: bool = False, x_ticks: bool = True) -> Iterator[Html]:
        """Draw the grid, the numbers and the titles of both axes; `whole` leaves out fractions on the x axis."""
        x, y = self.x, self.y
        for value in ticks(y.low, y.high, 5):
            yield svg_line(x.start, y.at(value), x.stop, y.at(value), "grid")
            yield label(x.start - 8, y.at(value) + 4, tick_text(value), "tick left")
        for value in ticks(x.low, x.high, 5) if x_ticks else ():
            if not whole or value == int(value):
                yield label(x.at(value), y.start + 17, tick_text(value), "tick")
        yield svg_line(x.start, y.start, x.stop, y.start, "axis")
        yield label((x.start + x.stop) / 2, self.height - 6, x_title, "axis-title")
        yield label(0, 0, y_title, "axis-title", transform=f"translate(12 {px((y.start + y.stop) / 2)}) rotate(-90)")

    def path(self, points: Points, style: str) -> Html:
        return el("path", d="M" + "L".join(f"{px(self.x.at(a))} {px(self.y.at(b))}" for a, b in points), class_=style)

    def diagonal(self) -> Html:
        return svg_line(self.x.start, self.y.start, self.x.stop, self.y.stop, "zero")


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


def drawing(title: str, text: str, parts: Child, width: float, height: float, kind: str | None = None) -> Html:
    """Return an SVG that also describes in words what it shows."""
    return el(
        "svg",
        el("title", title),
        el("desc", text),
        parts,
        viewBox=f"0 0 {width:.0f} {height:.0f}",
        role="img",
        class_=kind,
    )


def ticks(low: float, high: float, about: int = 4) -> list[float]:
    """Round values within the range: steps of 1, 2 or 5 times a power of ten."""
    exact_step = (high - low) / about
    power = 10 ** math.floor(math.log10(exact_step))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= exact_step * 0.999)
    first_multiple, last_multiple = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [i * step for i in range(first_multiple, last_multiple + 1)]


def svg_line(x1: float, y1: float, x2: float, y2: float, kind: str) -> Html:
    return el("line", x1=px(x1), y1=px(y1), x2=px(x2), y2=px(y2), class_=kind)


def label(x: float, y: float, text: str, kind: str, transform: str | None = None) -> Html:
    return el("text", text, x=px(x), y=px(y), class_=kind, transform=transform)


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


def interval_chart(difference: Range, bound: float, bound_text: str, equal_text: str, x_title: str) -> Html:
    """Draw the interval of a difference; the side below `bound`, where its lower end must not lie, is shaded."""
    ends = [difference.low, difference.high, bound, 0.0]
    pad = (max(ends) - min(ends) or 0.01) * 0.16
    x = Axis(min(ends) - pad, max(ends) + pad, 12, _WIDTH - 12)
    edge, low, center, high = (x.at(value) for value in (bound, difference.low, difference.estimate, difference.high))
    parts = [
        el("rect", x=0, y=_INTERVAL_TOP, width=px(edge), height=_FLOOR - _INTERVAL_TOP, class_="forbidden"),
        svg_line(edge, _INTERVAL_TOP, edge, _FLOOR, "bound"),
        svg_line(x.at(0.0), _INTERVAL_TOP, x.at(0.0), _FLOOR, "zero") if bound else None,
        _whisker(low, center, high, _MIDDLE, 10, 6),
        label(center, _MIDDLE - 16, signed(difference.estimate), "value"),
        label(min(max(edge, 60), _WIDTH - 60), 16, bound_text, "bound-label"),
        svg_line(12, _FLOOR, _WIDTH - 12, _FLOOR, "axis"),
        [
            (
                svg_line(x.at(value), _FLOOR, x.at(value), _FLOOR + 4, "axis"),
                label(x.at(value), 108, _tick(value), "tick"),
            )
            for value in ticks(x.low, x.high, 6)
        ],
        label(min(max(x.at(0.0), 80), _WIDTH - 80), 124, equal_text, "tick foot"),
        label(_WIDTH / 2, 142, x_title, "axis-title"),
    ]
    text = (
        f"difference {signed(difference.estimate)}, interval {signed(difference.low)} to {signed(difference.high)}; "
        f"its lower end must lie above {signed(bound)}"
    )
    return drawing("The difference and its interval", text, parts, _WIDTH, _HEIGHT, "wide")


def shared_axis(ranges: Sequence[Range | None]) -> Axis | None:
    """Return one scale for all rows of a table; zero is on it."""
    ends = [end for item in ranges if item for end in (item.low, item.high)]
    if not ends:
        return None
    low, high = min(*ends, 0.0), max(*ends, 0.0)
    pad = (high - low) * 0.05 or 0.01
    return Axis(low - pad, high + pad, 3, _SMALL_WIDTH - 3)


def small_interval(difference: Range | None, x: Axis | None) -> Html | None:
    if difference is None or x is None:
        return None
    middle, zero = _SMALL_HEIGHT / 2, x.at(0.0)
    parts = [
        svg_line(zero, 0, zero, _SMALL_HEIGHT, "zero"),
        _whisker(x.at(difference.low), x.at(difference.estimate), x.at(difference.high), middle, 4, 3),
    ]
    return drawing("Interval", interval_text(difference), parts, _SMALL_WIDTH, _SMALL_HEIGHT, "small")


def interval_text(difference: Range | None) -> str:
    if difference is None:
        return ""
    if difference.low == difference.high:
        return signed(difference.estimate)
    return f"{signed(difference.estimate)} [{signed(difference.low)}, {signed(difference.high)}]"


def _whisker(low: float, center: float, high: float, y: float, cap: float, radius: float) -> list[Html]:
    ends = [svg_line(end, y - cap, end, y + cap, "cap") for end in (low, high)]
    return [
        svg_line(low, y, high, y, "interval"),
        *ends,
        el("circle", cx=px(center), cy=px(y), r=radius, class_="estimate"),
    ]


def _tick(value: float) -> str:
    return f"{'+' if value > 0 else ''}{tick_text(value)}"
