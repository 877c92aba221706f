"""Sections on a classifier: ROC and precision-recall curves, confusion matrix, classes and calibration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pipeline.contract.results import Body, Facts, is_number, mappings
from pipeline.report.charts import RUN_STYLES, Chart, Circle, Legend, Line, Plot, Shape, make_plot
from pipeline.system.wording import MISSING, number, percent

_MAX_MATRIX_CLASSES = 30  # with more, only the confusions that occur are listed
_MAX_CONFUSIONS = 12  # shown
_CALIBRATION_CONFIDENCE = 0.95  # of the interval of each bin
_MODEL_STYLES = {"candidate": "one", "baseline": "two other"}
_SIDE, _SQUARE_HEIGHT = 440, 408  # of charts whose two axes go from 0 to 1
_COUNTS_HEIGHT = 150

Bins = Sequence[Mapping[str, Any]]


def curves(runs: Mapping[str, Facts]) -> Body | None:
    """Draw one curve per class, or one per run for two classes, each with the point where the model decides."""
    body = _curves_body(next(iter(runs.values())))
    if body is None:
        return None
    rows = mappings(body["curves"])
    is_binary = len(body["classes"]) == 2
    curves = _curves_by_run(runs) if is_binary and len(runs) > 1 else _curves_by_class(rows)
    positive = body["classes"][1] if is_binary else "the class"
    roc_titles = (f"share of the others taken for {positive}", f"share of {positive} found")
    precision_titles = (
        f"recall: share of {positive} found",
        f"precision: share of {positive} among answers {positive}",
    )
    return {
        "charts": [
            _curve_chart("ROC", curves, ("AUC", "auc"), "roc", ("fpr", "tpr"), roc_titles),
            _curve_chart(
                "Precision and recall",
                curves,
                ("AP", "average_precision"),
                "pr",
                ("tpr", "precision"),
                precision_titles,
            ),
        ],
        "classes": len(body["classes"]),
        "drawn": len({row["class"] for row in rows}),
        "positive": positive,
        "is_binary": is_binary,
        "rows": [
            (
                name,
                number(row["positives"]),
                *(number(row[key]) for key in ("auc", "average_precision")),
                *(number(row["decision"].get(key)) for key in ("tpr", "fpr", "precision")),
            )
            for name, _, row in curves
        ],
    }


def _curves_body(facts: Facts) -> Body | None:
    body = facts.figures.get("classification")
    return body if isinstance(body, dict) and body.get("curves") else None


Curve = tuple[str, str, Body]  # name, class of the stroke, numbers


def _curves_by_class(rows: Sequence[Body]) -> list[Curve]:
    """Return a curve for each class against the rest; of two classes, one for each model."""
    if {row["model"] for row in rows} != {"candidate"}:
        return [(row["model"], _MODEL_STYLES[row["model"]], row) for row in rows]
    return [
        (str(row["class"]), RUN_STYLES[i % len(RUN_STYLES)] + (" dash-1" if i >= len(RUN_STYLES) else ""), row)
        for i, row in enumerate(rows)
    ]


def _curves_by_run(runs: Mapping[str, Facts]) -> list[Curve]:
    found: list[Curve] = []
    for place, (name, facts) in enumerate(runs.items()):
        rows = mappings((_curves_body(facts) or {}).get("curves"))
        style = RUN_STYLES[place] + (f" dash-{place}" if place else "")
        found += [(name, style, row) for row in rows if row["model"] == "candidate"]
    return found


def _curve_chart(
    title: str,
    curves: Sequence[Curve],
    area: tuple[str, str],
    key: str,
    decision: tuple[str, str],
    axis_titles: tuple[str, str],
) -> Chart:
    plot = make_plot((0, 1), (0, 1), _SIDE, _SQUARE_HEIGHT)
    shapes = [
        *plot.frame(*axis_titles),
        *([plot.diagonal()] if key == "roc" else ()),
        *(plot.path(row[key], f"curve {style}") for _, style, row in reversed(curves)),
        *(shape for name, style, row in curves for shape in _decision(plot, name, style, row["decision"], decision)),
    ]
    legend = [(f"{name}: {area[0]} {number(row[area[1]])}", style) for name, style, row in curves]
    return plot.chart(title, "; ".join(name for name, _ in legend), shapes, "square", legend=legend)


def _decision(
    plot: Plot, name: str, style: str, decision: Mapping[str, Any], keys: tuple[str, str]
) -> Iterator[Circle]:
    x, y = (decision.get(key) for key in keys)
    if is_number(x) and is_number(y):
        text = f"{name}, the model’s decision: {number(x)} on the horizontal axis, {number(y)} on the vertical one"
        yield Circle(plot.x.at(x), plot.y.at(y), 4.2, f"dot {style}", text)


def confusion(facts: Facts) -> Body | None:
    matrix, classes = facts.metrics.get("confusion"), facts.metrics.get("classes")
    if not matrix or not classes:
        return None
    errors = [
        (count, classes[i], classes[j])
        for i, row in enumerate(matrix)
        for j, count in enumerate(row)
        if i != j and count
    ]
    errors.sort(key=lambda error: -error[0])
    largest = errors[0][0] if errors else 1
    return {
        "classes": classes,
        "rows": [_matrix_row(row, i, largest) for i, row in enumerate(matrix)],
        "drawn": len(classes) <= _MAX_MATRIX_CLASSES,
        "total": sum(map(sum, matrix)),
        "wrong": sum(count for count, _, _ in errors),
        "confusions": [
            (f"{actual} taken for {predicted}", number(n)) for n, actual, predicted in errors[:_MAX_CONFUSIONS]
        ],
    }


def _matrix_row(row: Sequence[int], diagonal: int, largest_error: int) -> list[dict[str, Any]]:
    """Return a row; correct answers and errors have separate colours and scales, or errors would be invisible."""
    cells = []
    for j, count in enumerate(row):
        correct = j == diagonal
        fraction = count / ((sum(row) if correct else largest_error) or 1)
        strength = (" strong" if fraction > 0.55 else " some") if count else ""
        cells.append(
            {
                "text": count if count or correct else "·",
                "kind": ("right" if correct else "wrong") + strength,
                "strength": (0.12 + 0.88 * fraction) * 100 if count else 0,
            }
        )
    return cells


def per_class(facts: Facts) -> Body | None:
    rows = facts.metrics.get("per_class")
    if not rows:
        return None
    rows_by_class = [(name, rows[name]) for name in facts.classes if name in rows]
    return {"rows": [(name, dict(row)) for name, row in rows_by_class]}


def calibration(facts: Facts) -> Body | None:
    """Draw how often answers are right by their stated confidence, with intervals, and how many there are."""
    curves = {name: bins for name in _MODEL_STYLES if (bins := _bins(facts.calibration.get(name)))}
    if not curves:
        return None
    models = [name for name in _MODEL_STYLES if isinstance(facts.calibration.get(name), dict)]
    scores = [
        (title, *[number(facts.calibration[name].get(key)) for name in models])
        for key, title in (("ece", "expected calibration error"), ("brier", "Brier score"))
    ]
    legend = [(name, _MODEL_STYLES[name]) for name in curves]
    return {
        "charts": [_calibration_chart(curves, legend), _counts_chart(curves, legend)],
        "models": models,
        "scores": scores,
        "confidence": f"{_CALIBRATION_CONFIDENCE:.0%}",
        "numbers": {name: [_bin_cells(bin_) for bin_ in bins] for name, bins in curves.items()},
    }


def _bins(body: Any) -> list[dict[str, Any]]:
    bins = mappings(body.get("bins")) if isinstance(body, dict) else []
    valid = [bin_ for bin_ in bins if is_number(bin_.get("confidence")) and is_number(bin_.get("accuracy"))]
    return [bin_ | {"interval": _bin_interval(bin_)} for bin_ in valid]


def _bin_interval(bin_: Mapping[str, Any]) -> tuple[float, float] | None:
    """Return the interval of the share of right answers; None for an empty bin."""
    from pipeline.statistics.intervals import proportion_interval  # slow to load

    count = _count(bin_)
    if not count:
        return None
    hits = min(max(round(bin_["accuracy"] * count), 0), count)
    interval = proportion_interval(hits, count, _CALIBRATION_CONFIDENCE)
    return interval.low, interval.high


def _count(bin_: Mapping[str, Any]) -> int:
    return int(bin_.get("count", bin_.get("samples", 0)) or 0)


def _bin_cells(bin_: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        f"{bin_.get('low', 0):.2f} to {bin_.get('high', 1):.2f}",
        number(_count(bin_)),
        percent(bin_["confidence"]),
        percent(bin_["accuracy"]),
        MISSING if bin_["interval"] is None else " to ".join(map(percent, bin_["interval"])),
    )


def _calibration_chart(curves: Mapping[str, Bins], legend: Legend) -> Chart:
    plot = make_plot((0, 1), (0, 1), _SIDE, _SQUARE_HEIGHT)
    shapes = [
        *plot.frame("stated confidence (mean of the bin)", "share of right answers"),
        plot.diagonal(),
        *(shape for name, bins in reversed(list(curves.items())) for shape in _calibration_curve(name, bins, plot)),
    ]
    name, bins = next(iter(curves.items()))
    texts = [f"{percent(bin_['confidence'])} stated and {percent(bin_['accuracy'])} right" for bin_ in bins]
    text, caption = f"{name}: {', '.join(texts)}", "Right answers by stated confidence"
    return plot.chart("Calibration curve", text, shapes, "square", caption=caption, legend=legend)


def _calibration_curve(name: str, bins: Bins, plot: Plot) -> Iterator[Shape]:
    style = _MODEL_STYLES[name]
    shift = 2.5 * list(_MODEL_STYLES).index(name)  # or the whiskers of two models would hide each other
    for bin_ in bins:
        if bin_["interval"] is not None:
            x, (low, high) = plot.x.at(bin_["confidence"]) + shift, map(plot.y.at, bin_["interval"])
            yield Line(x, low, x, high, f"whisker {style}")
    yield plot.path([(bin_["confidence"], bin_["accuracy"]) for bin_ in bins], f"curve {style}")
    for bin_ in bins:
        confidence, accuracy = percent(bin_["confidence"]), percent(bin_["accuracy"])
        bounds = "" if bin_["interval"] is None else f" ({' to '.join(map(percent, bin_['interval']))})"
        text = f"{name}: {confidence} stated, {accuracy} right{bounds}, {number(_count(bin_))} answers"
        yield Circle(plot.x.at(bin_["confidence"]), plot.y.at(bin_["accuracy"]), 3.4, f"dot {style}", text)


def _counts_chart(curves: Mapping[str, Bins], legend: Legend) -> Chart:
    """Draw one bar per model in each bin."""
    top = max(_count(bin_) for bins in curves.values() for bin_ in bins) or 1
    plot = make_plot((0, 1), (0, top * 1.06), _SIDE, _COUNTS_HEIGHT)
    shapes: list[Shape] = [*plot.frame("stated confidence", "answers")]
    for place, (name, bins) in enumerate(curves.items()):
        for bin_ in bins:
            count, low, high = _count(bin_), bin_.get("low", 0.0), bin_.get("high", 1.0)
            text = f"{name}: {number(count)} answers from {low:.2f} to {high:.2f}"
            shapes += plot.bar(low, high, count, _MODEL_STYLES[name], text, place, len(curves))
    texts = [f"{name}: {', '.join(number(_count(bin_)) for bin_ in bins)} answers" for name, bins in curves.items()]
    return plot.chart("Answers by stated confidence", "; ".join(texts), shapes, "square", legend=legend)
