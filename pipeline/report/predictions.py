"""Sections on the predictions of regressors and rankers, from `evaluate/figures.json`."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.contract.results import Body, Facts, is_number, mappings
from pipeline.report.charts import Axis, Plot, drawing, make_plot, px, svg_line
from pipeline.report.rendering import render
from pipeline.system.html import Html, el, number

_HEIGHT = 320
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
    plot = make_plot((low, high), (low, high), height=_HEIGHT)
    parts = [plot.frame("actual value", "predicted value"), plot.diagonal(), [_point(plot, *each) for each in points]]
    text = (
        f"{len(points)} samples; actual values from {number(min(a for a, _ in points))} to "
        f"{number(max(a for a, _ in points))}, predicted from {number(min(b for _, b in points))} to "
        f"{number(max(b for _, b in points))}"
    )
    return drawing("Predicted against actual", text, parts, plot.width, plot.height, "scatter one")


def _point(plot: Plot, actual: float, predicted: float) -> Html:
    text = f"actual {number(actual)}, predicted {number(predicted)}"
    return el("circle", el("title", text), cx=px(plot.x.at(actual)), cy=px(plot.y.at(predicted)), r=3)


def _residuals(body: Body) -> Html:
    counts = [int(count) for count in body["counts"]]
    plot = make_plot((float(body["low"]), float(body["high"])), (0, max(counts) * 1.06 or 1), height=_HEIGHT)
    x = plot.x
    width = (x.high - x.low) / len(counts)
    parts = [
        plot.frame("predicted minus actual value", "number of samples"),
        [_bar(plot, x.low + i * width, x.low + (i + 1) * width, count, "one") for i, count in enumerate(counts)],
        svg_line(x.at(0), plot.y.stop, x.at(0), plot.y.start, "zero") if x.low <= 0 <= x.high else None,
    ]
    text = f"mean {number(body['mean'])}; from {number(x.low)} to {number(x.high)}, most in {_top_bin(counts, x)}"
    return drawing("Residuals", text, parts, plot.width, plot.height)


def _top_bin(counts: Sequence[int], x: Axis) -> str:
    width, top = (x.high - x.low) / len(counts), counts.index(max(counts))
    return f"{number(x.low + top * width)} to {number(x.low + (top + 1) * width)}"


def _ndcg_chart(counts: dict[str, Sequence[int]]) -> Html:
    """Draw one bar per model in each bin of NDCG."""
    plot = make_plot((0, 1), (0, max(max(bins) for bins in counts.values()) * 1.06 or 1), height=_HEIGHT)
    bins, models = len(next(iter(counts.values()))), len(counts)
    bars = [
        _bar(
            plot, (i + (place + 0.06) / models) / bins, (i + (place + 0.94) / models) / bins, count, _MODELS[name], name
        )
        for place, (name, values) in enumerate(counts.items())
        for i, count in enumerate(values)
    ]
    text = "; ".join(
        f"{name}: {', '.join(map(str, values))} queries per tenth of ndcg" for name, values in counts.items()
    )
    parts = [plot.frame("NDCG of a query", "number of queries"), bars]
    return drawing("NDCG by query", text, parts, plot.width, plot.height)


def _bar(plot: Plot, low: float, high: float, count: int, style: str, name: str = "") -> Html | None:
    if not count:
        return None
    text = f"{name + ': ' if name else ''}{number(count)} from {number(low, 3)} to {number(high, 3)}"
    floor = plot.y.start
    left, right, top = plot.x.at(low), plot.x.at(high), min(plot.y.at(count), floor - 0.8)
    sides = {"x": px(left + 0.5), "y": px(top), "width": px(max(right - left - 1, 0.5)), "height": px(floor - top)}
    return el("rect", el("title", text), **sides, class_=f"bin {style}")
