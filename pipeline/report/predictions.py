"""Sections on the predictions of regressors and rankers, from `evaluate/figures.json`."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.contract.results import Body, Facts, is_number, mappings
from pipeline.report.charts import Axis, Chart, Circle, Line, Series, Shape, line_chart, make_plot
from pipeline.system.wording import number

_HEIGHT = 320
_MODELS = {"candidate": "one", "baseline": "two"}


def regression(facts: Facts) -> Body | None:
    """Draw predicted against actual values, the residuals and the error by decile."""
    body = facts.figures.get("regression")
    if not isinstance(body, dict):
        return None
    points = [(point[0], point[1]) for point in body["points"] if is_number(point[0]) and is_number(point[1])]
    deciles = mappings(body.get("deciles"))
    largest = max((row["mae"] for row in deciles if is_number(row.get("mae"))), default=0.0)
    scatter = _scatter(points, body.get("samples")) if points else None
    return {
        "samples": body.get("samples"),
        "not_finite": body.get("not_finite"),
        "charts": [scatter, _residuals(body["residuals"]) if body.get("residuals") else None],
        "deciles": deciles,
        "largest": largest or 1.0,
        "has_baseline": any(is_number(row.get("baseline_mae")) for row in deciles),
    }


def forecast(facts: Facts) -> Body | None:
    """Draw the error by horizon, and list which share of the true values is at or below each quantile."""
    horizons, shares = facts.metrics.get("horizons"), facts.metrics.get("coverage") or {}
    if not isinstance(horizons, dict):
        return None
    metric = "pinball" if "pinball" in horizons else "mae"
    by_model = {name: horizons[metric][name] for name in _MODELS if name in horizons[metric]}
    series = [
        Series(name, [(i + 1, value) for i, value in enumerate(values) if is_number(value)], _MODELS[name])
        for name, values in by_model.items()
    ]
    names = [name for name in ("level", *_MODELS) if name in shares]
    rows = [list(map(number, row)) for row in zip(*(shares[name] for name in names), strict=True)]
    return {"chart": line_chart("Error by horizon", series, metric, x_title="horizon"), "names": names, "rows": rows}


def ranking(facts: Facts) -> Body | None:
    """Draw the distribution of NDCG over the queries, and list the worst ones."""
    body = facts.figures.get("ranking")
    if not isinstance(body, dict):
        return None
    counts = {name: body["histogram"][name] for name in _MODELS if name in body["histogram"]}
    return {
        "queries": body.get("queries"),
        "omitted": body.get("without_relevant"),
        "chart": _ndcg_chart(counts),
        "worst": mappings(body.get("worst")),
        "has_baseline": "baseline" in counts,
    }


def _scatter(points: Sequence[tuple[float, float]], samples: int | None) -> Chart:
    """Draw both values on one scale; samples on the diagonal are predicted exactly."""
    values = [value for point in points for value in point]
    pad = (max(values) - min(values)) * 0.04 or abs(values[0]) * 0.1 or 1.0
    low, high = min(values) - pad, max(values) + pad
    plot = make_plot((low, high), (low, high), height=_HEIGHT)
    dots = [Circle(plot.x.at(a), plot.y.at(b), 3, "", f"actual {number(a)}, predicted {number(b)}") for a, b in points]
    shapes = [*plot.frame("actual value", "predicted value"), plot.diagonal(), *dots]
    text = (
        f"{len(points)} samples; actual values from {number(min(a for a, _ in points))} to "
        f"{number(max(a for a, _ in points))}, predicted from {number(min(b for _, b in points))} to "
        f"{number(max(b for _, b in points))}"
    )
    note = f"{number(len(points))} of {number(samples)} samples" if samples and len(points) < samples else ""
    caption = "Predicted by actual"
    return plot.chart("Predicted against actual", text, shapes, "scatter one", caption=caption, note=note)


def _residuals(body: Body) -> Chart:
    counts = [int(count) for count in body["counts"]]
    plot = make_plot((float(body["low"]), float(body["high"])), (0, max(counts) * 1.06 or 1), height=_HEIGHT)
    x = plot.x
    shapes: list[Shape] = [*plot.frame("predicted minus actual value", "number of samples")]
    for count, (low, high) in zip(counts, _bins(x, len(counts)), strict=True):
        shapes += plot.bar(low, high, count, "one", f"{number(count)} from {number(low, 3)} to {number(high, 3)}")
    if x.low <= 0 <= x.high:
        shapes.append(Line(x.at(0), plot.y.stop, x.at(0), plot.y.start, "zero"))
    low, high = _bins(x, len(counts))[counts.index(max(counts))]
    most = f"{number(low)} to {number(high)}"
    text = f"mean {number(body['mean'])}; from {number(x.low)} to {number(x.high)}, most in {most}"
    return plot.chart("Residuals", text, shapes)


def _bins(x: Axis, count: int) -> list[tuple[float, float]]:
    width = (x.high - x.low) / count
    return [(x.low + i * width, x.low + (i + 1) * width) for i in range(count)]


def _ndcg_chart(counts: dict[str, Sequence[int]]) -> Chart:
    """Draw one bar per model in each bin of NDCG."""
    plot = make_plot((0, 1), (0, max(max(bins) for bins in counts.values()) * 1.06 or 1), height=_HEIGHT)
    shapes: list[Shape] = [*plot.frame("NDCG of a query", "number of queries")]
    for place, (name, values) in enumerate(counts.items()):
        for count, (low, high) in zip(values, _bins(plot.x, len(values)), strict=True):
            tooltip = f"{name}: {number(count)} from {number(low, 3)} to {number(high, 3)}"
            shapes += plot.bar(low, high, count, _MODELS[name], tooltip, place, len(counts))
    text = "; ".join(
        f"{name}: {', '.join(map(str, values))} queries per tenth of ndcg" for name, values in counts.items()
    )
    legend = [(name, _MODELS[name]) for name in counts]
    return plot.chart("NDCG by query", text, shapes, caption="Queries by NDCG", legend=legend)
