"""How a mixture of experts shared out its tokens: balance and certainty of the routers, and the last loads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipeline.report.charts import Points, Series, line_chart
from pipeline.spec.facts import Facts, is_number
from pipeline.spec.html import Child, Html, el, pairs
from pipeline.spec.wording import number, percent

_MOST_ROWS = 64  # bars, of the layers whose last loads are the most uneven


def mixture(facts: Facts) -> Child:
    """Nothing for a model without experts."""
    if not _curve(facts, "load_max_over_mean"):
        return None
    balance = [
        Series("mean of layers", _curve(facts, "load_max_over_mean"), "one", smooth=True),
        Series("worst layer", list(_worst(facts)), "two"),
    ]
    charts = [
        line_chart("Largest load over the mean", balance),
        line_chart("Router entropy", [Series("1: no choice", _curve(facts, "router_entropy"), "three", smooth=True)]),
        _loads(facts),
    ]
    return el("div", charts, pairs(_figures(facts)), class_="charts")


def _curve(facts: Facts, name: str) -> Points:
    lines = [(line["step"], line["experts"].get(name)) for line in facts.steps if isinstance(line.get("experts"), dict)]
    return [(step, value) for step, value in lines if is_number(value)]


def _worst(facts: Facts) -> Iterator[tuple[float, float]]:
    for line in facts.steps:
        layers = line.get("expert_load_max_over_mean")
        if isinstance(layers, dict) and layers:
            yield line["step"], max(layers.values())


def _figures(facts: Facts) -> Iterator[tuple[str, str]]:
    yield "largest load over the mean, at last", number(_curve(facts, "load_max_over_mean")[-1][1])
    if entropy := _curve(facts, "router_entropy"):
        yield "router entropy, at last", f"{percent(entropy[-1][1])} of the most there can be"
    yield "dropped tokens", number(sum(value for _, value in _curve(facts, "dropped_tokens")))


def _loads(facts: Facts) -> Html | None:
    """Of the last steps that were told, a bar for each expert."""
    told = [line["expert_loads"] for line in facts.steps if line.get("expert_loads")]
    if not told:
        return None
    layers = sorted(enumerate(told[-1]), key=lambda layer: _peak(layer[1]), reverse=True)
    rows = [
        _row(f"{layer}.{expert}", count, max(loads)) for layer, loads in layers for expert, count in enumerate(loads)
    ]
    caption = el("figcaption", el("b", "Tokens of each expert"), el("span", "layer.expert", class_="legend"))
    return el("figure", caption, el("div", rows[:_MOST_ROWS], class_="times"), class_="tried")


def _row(name: str, count: int, top: int) -> Html:
    bar = el("div", el("i", style=f"width:{100 * count / max(top, 1):.1f}%"))
    return el("div", el("span", name), bar, el("b", number(count)))


def _peak(loads: Sequence[float]) -> float:
    return max(loads) * len(loads) / max(sum(loads), 1)
