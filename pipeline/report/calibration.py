"""Whether stated probabilities are true: the calibration curve with how many answers each point rests on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pipeline.report.scale import Axis, drawing, label, line, px, tick_text
from pipeline.spec.facts import Facts, is_number, mappings
from pipeline.spec.html import Child, Html, el, table
from pipeline.spec.wording import number, percent

_SIDE, _LEFT, _TOP = 300, 44, 10  # of the square
_COUNTS = 54  # height of the bars below it
_WIDTH, _HEIGHT = _LEFT + _SIDE + 12, _TOP + _SIDE + _COUNTS + 52
_OWNERS = {"candidate": "one", "baseline": "two other"}


def calibration(facts: Facts) -> Child:
    curves = {name: bins for name in _OWNERS if (bins := _bins(facts.calibration.get(name)))}
    if not curves:
        return None
    return el("div", _figure(curves), el("div", _scores(facts), _listed(curves)), class_="split even")


def _bins(body: Any) -> list[dict[str, Any]]:
    found = mappings(body.get("bins")) if isinstance(body, dict) else []
    return [one for one in found if is_number(one.get("confidence")) and is_number(one.get("accuracy"))]


def _count(one: dict[str, Any]) -> int:
    return int(one.get("count", one.get("samples", 0)) or 0)


def _figure(curves: dict[str, list[dict[str, Any]]]) -> Html:
    x = Axis(0, 1, _LEFT, _LEFT + _SIDE)
    y = Axis(0, 1, _TOP + _SIDE, _TOP)
    parts = [
        _frame(x, y),
        [_curve(name, bins, x, y) for name, bins in curves.items()],
        _bars(next(iter(curves.items())), x),
    ]
    first, bins = next(iter(curves.items()))
    points = ", ".join(f"{percent(one['confidence'])} stated and {percent(one['accuracy'])} right" for one in bins)
    legend = [el("span", el("i", class_=_OWNERS[name]), name) for name in curves]
    caption = el(
        "figcaption", el("b", "Stated confidence against the share that is right"), el("span", legend, class_="legend")
    )
    return el("figure", caption, drawing("Calibration curve", f"{first}: {points}", parts, _WIDTH, _HEIGHT, "square"))


def _frame(x: Axis, y: Axis) -> Iterator[Html]:
    for value in (0, 0.25, 0.5, 0.75, 1):
        yield line(_LEFT, y.at(value), _LEFT + _SIDE, y.at(value), "grid")
        yield label(_LEFT - 8, y.at(value) + 4, tick_text(value), "tick left")
        yield label(x.at(value), _HEIGHT - 22, tick_text(value), "tick")
    yield line(x.at(0), y.at(0), x.at(1), y.at(1), "zero")
    yield label(x.at(0.5), _HEIGHT - 4, "stated confidence; bars: how many answers", "tick")


def _curve(name: str, bins: Sequence[dict[str, Any]], x: Axis, y: Axis) -> list[Html]:
    points = [(x.at(one["confidence"]), y.at(one["accuracy"])) for one in bins]
    kind = _OWNERS[name]
    path = el("path", d="M" + "L".join(f"{px(a)} {px(b)}" for a, b in points), class_=f"curve {kind}")
    return [path, *[_dot(name, one, *place) for one, place in zip(bins, points, strict=True)]]


def _dot(name: str, one: dict[str, Any], x: float, y: float) -> Html:
    told = (
        f"{name}: {percent(one['confidence'])} stated, {percent(one['accuracy'])} right, {number(_count(one))} answers"
    )
    return el("circle", el("title", told), cx=px(x), cy=px(y), r=3.4, class_=f"dot {_OWNERS[name]}")


def _bars(curve: tuple[str, list[dict[str, Any]]], x: Axis) -> Iterator[Html]:
    name, bins = curve
    top, floor = max(map(_count, bins)) or 1, _TOP + _SIDE + 8 + _COUNTS
    for one in bins:
        low, high = x.at(one.get("low", 0.0)), x.at(one.get("high", 1.0))
        height = max(_COUNTS * _count(one) / top, 0.8 if _count(one) else 0.0)
        told = el(
            "title", f"{name}: {number(_count(one))} answers from {one.get('low', 0):.2f} to {one.get('high', 1):.2f}"
        )
        yield el(
            "rect",
            told,
            x=px(low + 1),
            y=px(floor - height),
            width=px(high - low - 2),
            height=px(height),
            class_="count",
        )


def _scores(facts: Facts) -> Html:
    names = [name for name in _OWNERS if isinstance(facts.calibration.get(name), dict)]
    rows = [
        (title, *[number(facts.calibration[name].get(key)) for name in names])
        for key, title in (("ece", "expected calibration error"), ("brier", "Brier score"))
    ]
    note = el("p", "Lower is better for both; a curve below the diagonal is surer than it is right.", class_="muted")
    return el("div", table(["", *names], rows), note)


def _listed(curves: dict[str, list[dict[str, Any]]]) -> Html:
    rows = [
        (
            f"{one.get('low', 0):.2f} to {one.get('high', 1):.2f}",
            number(_count(one)),
            percent(one["confidence"]),
            percent(one["accuracy"]),
        )
        for one in next(iter(curves.values()))
    ]
    return el("details", el("summary", "The numbers of the curve"), table(["bin", "answers", "stated", "right"], rows))
