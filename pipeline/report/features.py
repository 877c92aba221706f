"""Section on the inputs and labels of each split, and their drift: histograms from `prepare/profile.json`.

The bins of a profile are equally full in the training split; they are drawn in bins of equal width.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pipeline.contract.results import Body, Facts, is_number, mappings
from pipeline.contract.run import Run, all_runs
from pipeline.contract.task import SPLITS
from pipeline.data_checks.champion import CHAMPION_PART
from pipeline.report.charts import (
    WIDTH,
    Axis,
    Chart,
    Circle,
    Label,
    Line,
    Path,
    Plot,
    Shape,
    make_plot,
    tick_text,
    ticks,
)
from pipeline.system.errors import PipelineError
from pipeline.system.files import read_object
from pipeline.system.wording import number, percent

_MAX_FEATURES = 12  # drawn
_MAX_VALUES = 16  # of a category, drawn
_MAX_DRIFTS = 24  # drawn
_BINS = 24
_MAX_INTEGERS = 40  # with a bin each
_MAX_DISCRETE_EDGES = 6  # of a profile's bins; with fewer than its quantiles, the data have few values
_STYLES = {"train": "one", "validation": "three", "test": "two"}
_CHAMPION, _CHAMPION_STYLE = "champion’s training data", "four dash-1"
_DIGEST_LENGTH = 64
_HEIGHT = 230
_DRIFT_ROW = 34


def read_champion_profile(run: Run, facts: Facts) -> Body:
    """Return the profile of the champion that prepare compared the data with; empty if its run is not here."""
    record = facts.step("prepare")
    bundle = record.parts.get(CHAMPION_PART, "") if record else ""
    if len(bundle) != _DIGEST_LENGTH:
        return {}
    for other in all_runs(run.runs):
        path = other.output("prepare") / "profile.json"
        if bundle.encode() not in (other.path / "run.json").read_bytes() or not path.is_file():
            continue
        try:
            export = other.read().steps.get("export")
            if export is not None and export.outputs.get("bundle/manifest.json") == bundle:
                body: Body = read_object(path)
                return body
        except PipelineError:  # damaged; commands that need the run report it
            continue
    return {}


@dataclass(frozen=True)
class Distribution:
    """The shares of one feature by data set."""

    name: str
    is_input: bool
    shares: Mapping[str, Sequence[float]]  # by the name of the data set
    values: tuple[str, ...] = ()  # of a category; empty: numbers
    low: float = 0.0
    high: float = 1.0
    unit: str = "samples"

    @property
    def drift(self) -> float:
        """Return the largest share of samples that would have to change for a data set to be as the training data."""
        train = self.shares.get("train", ())
        others = [shares for name, shares in self.shares.items() if name != "train"]
        return max((sum(abs(a - b) for a, b in zip(train, each, strict=True)) / 2 for each in others), default=0.0)


def histograms(facts: Facts, champion: Body) -> Body | None:
    """Draw each feature by split and of the champion's training data, and the drift that the checks measured."""
    of_champion = {str(feature["name"]): feature for feature in mappings(champion.get("features"))}
    features = [
        feature
        for feature in mappings(facts.profile.get("features"))
        if "(projection " not in feature["name"]  # of images: random directions, which mean nothing to a reader
    ]
    distributions = [
        distribution
        for feature in features
        if (distribution := _distribution(facts.profile, feature, of_champion.get(feature["name"])))
    ]
    if not distributions:
        return None
    drawn = _choose(distributions)
    return {
        "charts": [*map(_chart, drawn), _drift_chart(facts.checks)],
        "drawn": len(drawn),
        "total": len(distributions),
        "has_champion": any(_CHAMPION in distribution.shares for distribution in drawn),
    }


def _choose(distributions: Sequence[Distribution]) -> list[Distribution]:
    """Return labels and those inputs that differ most between the data sets, in the order of the profile."""
    inputs = sorted((each for each in distributions if each.is_input), key=lambda each: -each.drift)
    labels = [each for each in distributions if not each.is_input][:2]
    chosen = [*inputs[: _MAX_FEATURES - len(labels)], *labels]
    return [each for each in distributions if each in chosen]


def _distribution(profile: Body, feature: Body, of_champion: Body | None) -> Distribution | None:
    splits = {name: feature["splits"][name] for name in SPLITS if any(feature["splits"].get(name, {}).get("bins", ()))}
    if not splits:
        return None
    sets = {name: (feature, histogram) for name, histogram in splits.items()}
    train = ((of_champion or {}).get("splits") or {}).get("train")
    if of_champion and train and any(train["bins"]) and of_champion["kind"] == feature["kind"]:
        sets[_CHAMPION] = (of_champion, train)
    shape = ((profile.get("columns") or {}).get("train") or {}).get(feature["column"], {}).get("shape") or ()
    name, is_input = str(feature["name"]), feature["column"] in profile.get("inputs", ())
    if feature["kind"] == "ids":
        return _categories(name, is_input, sets, "samples" if math.prod(shape) == 1 else "values")
    bounds = _bounds(feature["edges"])
    shares = {each: _rebin(of["edges"], histogram["bins"], bounds) for each, (of, histogram) in sets.items()}
    return Distribution(name, is_input, shares, (), bounds[0], bounds[-1])


def _categories(name: str, is_input: bool, sets: Mapping[str, tuple[Body, Body]], unit: str) -> Distribution:
    """Return the shares of the most frequent values, and of all others."""
    by_set = {
        each: dict(zip(of["ids"], (count / sum(histogram["bins"]) for count in histogram["bins"]), strict=False))
        for each, (of, histogram) in sets.items()
    }
    feature = next(iter(sets.values()))[0]
    words = dict(zip(feature["ids"], feature.get("words") or (), strict=False))
    frequent = sorted(feature["ids"], key=lambda value: -max(shares.get(value, 0) for shares in by_set.values()))
    chosen = sorted(frequent[:_MAX_VALUES])
    shares = {each: [found.get(value, 0.0) for value in chosen] for each, found in by_set.items()}
    rest = {each: max(1 - sum(values), 0.0) for each, values in shares.items()}
    has_rest = any(share > 1e-9 for share in rest.values())
    values = [str(words.get(value, value)) for value in chosen] + ["others"] * has_rest
    all_shares = {each: [*found, rest[each]] if has_rest else found for each, found in shares.items()}
    return Distribution(name, is_input, all_shares, tuple(values), unit=unit)


def _bounds(edges: Sequence[float]) -> list[float]:
    """Return the edges of the drawn bins: one bin for each of a few integers, or bins of equal width."""
    if _are_integers(edges) and edges[-1] - edges[1] < _MAX_INTEGERS:
        first = int(edges[1])
        return [first - 0.5 + i for i in range(int(edges[-1]) - first + 2)]
    low, high = edges[0], edges[-1]
    if len(edges) > 3 and (middle := edges[-2] - edges[1]) > 0:  # without tails far beyond the other values
        low, high = max(low, edges[1] - middle), min(high, edges[-2] + middle)
    pad = 0.0 if high - low > abs(high) * 1e-9 else abs(high) * 0.1 or 1.0  # a constant
    low, high = low - pad, high + pad
    return [low + (high - low) * (i / _BINS) for i in range(_BINS + 1)]


def _are_integers(edges: Sequence[float]) -> bool:
    """Whether the edges, which are values of the data except the first one, are integers."""
    return len(edges) > 1 and all(float(edge).is_integer() for edge in edges[1:])


def _rebin(edges: Sequence[float], counts: Sequence[int], bounds: Sequence[float]) -> list[float]:
    """Spread the counts of the profile's bins over the drawn bins, as shares of all samples."""
    shares, total = [0.0] * (len(bounds) - 1), sum(counts)
    for k, count in enumerate(counts):
        start = edges[k - 1] if k else edges[0]
        stop = edges[k] if k < len(edges) else edges[-1]
        if _are_integers(edges):
            start, stop = math.floor(start) + 0.5, stop + 0.5
        elif len(edges) <= _MAX_DISCRETE_EDGES:  # a few values, each at the upper end of its bin
            start = stop
        for i, part in _parts(bounds, start, stop):
            shares[i] += part * count / total
    return shares


def _parts(bounds: Sequence[float], start: float, stop: float) -> Iterator[tuple[int, float]]:
    """Yield the bins that an interval covers, each with its part of the interval."""
    low, high = bounds[0], bounds[-1]
    a, b = min(max(start, low), high), min(max(stop, low), high)
    if b - a <= (high - low) * 1e-6:  # a single value, or all of it beyond the range
        yield min(max(bisect.bisect_left(bounds, b) - 1, 0), len(bounds) - 2), 1.0
        return
    first, last = max(bisect.bisect_right(bounds, a) - 1, 0), min(bisect.bisect_left(bounds, b) - 1, len(bounds) - 2)
    for i in range(first, last + 1):
        covered = min(bounds[i + 1], b) - max(bounds[i], a)
        if covered > 0:
            yield i, covered / (b - a)


def _chart(distribution: Distribution) -> Chart:
    top = max(share for shares in distribution.shares.values() for share in shares) or 1.0
    styles = {name: _STYLES.get(name, _CHAMPION_STYLE) for name in distribution.shares}
    categories = len(distribution.values)
    x = (0.0, float(categories)) if categories else (distribution.low, distribution.high)
    plot = make_plot(x, (0.0, top * 1.08), height=_HEIGHT)
    shapes = [
        *plot.frame(distribution.name, f"share of {distribution.unit}", x_ticks=not categories),
        *(_bars if categories else _outlines)(plot, distribution, styles),
    ]
    text = f"{distribution.name} in {', '.join(distribution.shares)}; the largest difference to train is " + percent(
        distribution.drift
    )
    title, legend = f"Distribution of {distribution.name}", list(styles.items())
    return plot.chart(title, text, shapes, caption=distribution.name, legend=legend)


def _outlines(plot: Plot, distribution: Distribution, styles: Mapping[str, str]) -> Iterator[Shape]:
    """Draw the training data as bars, and the other data sets as lines."""
    train = distribution.shares.get("train", ())
    width = (plot.x.high - plot.x.low) / max(len(train), 1)
    for i, share in enumerate(train):
        low, high = plot.x.low + i * width, plot.x.low + (i + 1) * width
        text = f"train: {percent(share)} from {number(low, 3)} to {number(high, 3)}"
        yield from plot.bar(low, high, share, "soft one", text)
    yield from (_outline(plot, distribution.shares[name], style) for name, style in styles.items() if name != "train")


def _outline(plot: Plot, shares: Sequence[float], style: str) -> Path:
    width = (plot.x.high - plot.x.low) / len(shares)
    points = [(plot.x.low, 0.0)]
    for i, share in enumerate(shares):
        points += [(plot.x.low + i * width, share), (plot.x.low + (i + 1) * width, share)]
    return plot.path([*points, (plot.x.high, 0.0)], f"curve thin {style}")


def _bars(plot: Plot, distribution: Distribution, styles: Mapping[str, str]) -> Iterator[Shape]:
    """Draw the bars of all data sets side by side for each value, with its name below where there is room."""
    room = (plot.x.stop - plot.x.start) / len(distribution.values) / 7  # characters
    for i, value in enumerate(distribution.values):
        for place, (name, shares) in enumerate(distribution.shares.items()):
            text = f"{name}: {percent(shares[i])} {value}"
            yield from plot.bar(i + 0.1, i + 0.9, shares[i], styles[name], text, place, len(distribution.shares))
        shown = value if len(value) <= room else value[: max(int(room) - 1, 1)] + "…"
        yield Label(plot.x.at(i + 0.5), plot.y.start + 17, shown, "tick")


def _drift_chart(checks: Sequence[Body]) -> Chart | None:
    """Draw the population stability index of each column that the checks compared, with its limit."""
    rows = [
        check
        for check in checks
        if check.get("check") in ("drift", "labels") and is_number(check.get("value")) and is_number(check.get("limit"))
    ]
    rows.sort(key=lambda check: -check["value"])
    rows = rows[:_MAX_DRIFTS]
    if not rows:
        return None
    limit = rows[0]["limit"]
    top = max([limit, *(check["value"] for check in rows)]) * 1.1 or 1.0
    height = 52 + _DRIFT_ROW * len(rows)
    plot = Plot(Axis(0, top, 12, WIDTH - 12), Axis(0, 1, height - 46, 6), width=WIDTH, height=height)
    x_limit = plot.x.at(limit)
    shapes: list[Shape] = [*_drift_axis(plot), Line(x_limit, plot.y.stop, x_limit, plot.y.start, "bound")]
    for i, check in enumerate(rows):
        name, end = _drift_name(check), plot.x.at(check["value"])
        y, kind = plot.y.stop + _DRIFT_ROW * (i + 0.75), "bad" if check.get("level") in ("warn", "error") else "one"
        shapes += [
            Label(plot.x.start, y - 8, name, "tick start"),
            Line(plot.x.start, y, end, y, f"stem {kind}"),
            Circle(end, y, 4, f"point {kind}", f"{name}: {number(check['value'])}"),
        ]
    text = "; ".join(f"{_drift_name(check)} {number(check['value'])}" for check in rows)
    note = f"the line is the limit, {number(limit)}"
    return plot.chart("Drift by column", text, shapes, caption="Drift", note=note)


def _drift_axis(plot: Plot) -> Iterator[Shape]:
    for value in ticks(plot.x.low, plot.x.high):
        yield Line(plot.x.at(value), plot.y.stop, plot.x.at(value), plot.y.start, "grid")
        yield Label(plot.x.at(value), plot.y.start + 17, tick_text(value), "tick")
    yield Label((plot.x.start + plot.x.stop) / 2, plot.height - 6, "population stability index (PSI)", "axis-title")


def _drift_name(check: Body) -> str:
    """Return the column and the two data sets, as in `image: test, train`."""
    split, _, column = str(check.get("where", "")).partition(".")
    against = "champion" if check.get("against") == "champion" else "train"
    return f"{column}: {split} against {against}" if column else f"{split} against {against}"
