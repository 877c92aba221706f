"""Sections on the predictions of regressors and rankers, from `evaluate/figures.json`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipeline.contract.facts import Body, Facts, is_number, mappings
from pipeline.contract.html import Html, el, number
from pipeline.report.charts import Axis, drawing, label, px, svg_line, tick_text, ticks
from pipeline.report.rendering import render

_WIDTH, _HEIGHT = 480, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 12, 46
_FLOOR = _HEIGHT - _BOTTOM
_MODELS = {"candidate": "one", "baseline": "two"}


def regression(facts: Facts) -> Html | None:
    """Draw predicted against actual values, the residuals and the error by decile."""
    body = facts.figures.get("regression")
    if not isinstance(body, dict):
        return None
    points = [(point[0], point[1]) for point in body["points"] if is_number(point[0]) and is_number(point[1])]
    deciles = mappings(body.get("deciles"))
    largest = max((row["mae"] for row in deciles if is_number(row.get("mae"))), default=0.0)
    return render(
        "regression.html",
        samples=body.get("samples"),
        points=len(points),
        not_finite=body.get("not_finite"),
        scatter=_scatter(points) if points else "",
        residuals=_residuals(body["residuals"]) if body.get("residuals") else "",
        deciles=deciles,
        largest=largest or 1.0,
        has_baseline=any(is_number(row.get("baseline_mae")) for row in deciles),
    )


def ranking(facts: Facts) -> Html | None:
    """Draw the distribution of NDCG over the queries, and list the worst ones."""
    body = facts.figures.get("ranking")
    if not isinstance(body, dict):
        return None
    counts = {name: body["histogram"][name] for name in _MODELS if name in body["histogram"]}
    worst = mappings(body.get("worst"))
    return render(
        "ranking.html",
        queries=body.get("queries"),
        omitted=body.get("without_relevant"),
        chart=_ndcg_chart(counts),
        legend=[(name, _MODELS[name]) for name in counts],
        worst=worst,
        has_baseline="baseline" in counts,
    )


def _scatter(points: Sequence[tuple[float, float]]) -> Html:
    """Draw both values on one scale; samples on the diagonal are predicted exactly."""
    values = [value for point in points for value in point]
    pad = (max(values) - min(values)) * 0.04 or abs(values[0]) * 0.1 or 1.0
    low, high = min(values) - pad, max(values) + pad
    x, y = Axis(low, high, _LEFT, _WIDTH - _RIGHT), Axis(low, high, _FLOOR, _TOP)
    parts = [
        _frame(x, y, "actual"),
        svg_line(x.at(low), y.at(low), x.at(high), y.at(high), "zero"),
        [
            el("circle", el("title", f"actual {number(a)}, predicted {number(b)}"), cx=px(x.at(a)), cy=px(y.at(b)), r=3)
            for a, b in points
        ],
    ]
    text = (
        f"{len(points)} samples; actual values from {number(min(a for a, _ in points))} to "
        f"{number(max(a for a, _ in points))}, predicted from {number(min(b for _, b in points))} to "
        f"{number(max(b for _, b in points))}"
    )
    return drawing("Predicted against actual", text, parts, _WIDTH, _HEIGHT, "scatter one")


def _residuals(body: Body) -> Html:
    counts = [int(count) for count in body["counts"]]
    x = Axis(float(body["low"]), float(body["high"]), _LEFT, _WIDTH - _RIGHT)
    y = Axis(0, max(counts) * 1.06 or 1, _FLOOR, _TOP)
    width = (x.high - x.low) / len(counts)
    parts = [
        _frame(x, y, "predicted minus actual"),
        [_bar(x, y, x.low + i * width, x.low + (i + 1) * width, count, "one") for i, count in enumerate(counts)],
        svg_line(x.at(0), _TOP, x.at(0), _FLOOR, "zero") if x.low <= 0 <= x.high else None,
    ]
    text = f"mean {number(body['mean'])}; from {number(x.low)} to {number(x.high)}, most in {_top_bin(counts, x)}"
    return drawing("Residuals", text, parts, _WIDTH, _HEIGHT)


def _top_bin(counts: Sequence[int], x: Axis) -> str:
    width, top = (x.high - x.low) / len(counts), counts.index(max(counts))
    return f"{number(x.low + top * width)} to {number(x.low + (top + 1) * width)}"


def _ndcg_chart(counts: dict[str, Sequence[int]]) -> Html:
    """Draw one bar per model in each bin of NDCG."""
    x = Axis(0, 1, _LEFT, _WIDTH - _RIGHT)
    y = Axis(0, max(max(bins) for bins in counts.values()) * 1.06 or 1, _FLOOR, _TOP)
    bins, models = len(next(iter(counts.values()))), len(counts)
    bars = [
        _bar(
            x, y, (i + (place + 0.06) / models) / bins, (i + (place + 0.94) / models) / bins, count, _MODELS[name], name
        )
        for place, (name, values) in enumerate(counts.items())
        for i, count in enumerate(values)
    ]
    text = "; ".join(
        f"{name}: {', '.join(map(str, values))} queries per tenth of ndcg" for name, values in counts.items()
    )
    return drawing("NDCG by query", text, [_frame(x, y, "ndcg of a query"), bars], _WIDTH, _HEIGHT)


def _bar(x: Axis, y: Axis, low: float, high: float, count: int, style: str, name: str = "") -> Html | None:
    if not count:
        return None
    text = f"{name + ': ' if name else ''}{number(count)} from {number(low, 3)} to {number(high, 3)}"
    left, right, top = x.at(low), x.at(high), min(y.at(count), _FLOOR - 0.8)
    sides = {"x": px(left + 0.5), "y": px(top), "width": px(max(right - left - 1, 0.5)), "height": px(_FLOOR - top)}
    return el("rect", el("title", text), **sides, class_=f"bin {style}")


def _frame(x: Axis, y: Axis, text: str) -> Iterator[Html]:
    """Draw the grid and the axes; `text` names the horizontal one."""
    for value in ticks(y.low, y.high):
        yield svg_line(_LEFT, y.at(value), _WIDTH - _RIGHT, y.at(value), "grid")
        yield label(_LEFT - 8, y.at(value) + 4, tick_text(value), "tick left")
    for value in ticks(x.low, x.high):
        yield label(x.at(value), _FLOOR + 17, tick_text(value), "tick")
    yield label((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 8, text, "tick")
