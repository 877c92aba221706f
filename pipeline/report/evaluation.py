"""Sections of the evaluate step: verdict, slices, confusion matrix, classes and calibration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pipeline.contract.facts import Facts, is_number, mappings
from pipeline.contract.html import Html, el, number, percent, short, signed
from pipeline.report.charts import (
    Axis,
    Range,
    drawing,
    interval_chart,
    interval_text,
    label,
    parse_range,
    px,
    shared_axis,
    small_interval,
    svg_line,
    tick_text,
)
from pipeline.report.rendering import render

_MAX_SLICES = 100  # shown
_MAX_MATRIX_CLASSES = 30  # with more, only the confusions that occur are listed
_MAX_CONFUSIONS = 12  # shown


def verdict(facts: Facts) -> Html | None:
    body = facts.verdict
    if not body:
        return None
    bound, difference = margin_bound(body), parse_range(body.get("difference"))
    return render(
        "verdict.html",
        pass_reason=facts.pass_reason,
        verdict=body,
        level=_level(body),
        baseline=_baseline_name(facts),
        difference=difference,
        chart=interval_chart(difference, bound, f"margin {signed(bound)}", "equal to baseline") if difference else "",
        rules=mappings(body.get("rules")),
        metrics=_metric_rows(facts),
        mcnemar=body.get("mcnemar"),
        p_value=body.get("p_value") if is_number(body.get("p_value")) else None,
    )


def _level(verdict: Mapping[str, Any]) -> str:
    """Return the level of the interval, and which comparison on the test set it is, unless it is the first."""
    comparison = verdict.get("comparison")
    if not isinstance(comparison, Mapping):  # a run of an older version, or without a baseline
        return f"{verdict.get('confidence', 0):.0%} interval"
    return f"{comparison.get('level')} interval" + (
        f" ({comparison.get('text')})" if comparison.get("number") != 1 else ""
    )


def margin_bound(verdict: Mapping[str, Any]) -> float:
    """Return the bound of the interval's lower end: negative, unless the candidate must be better (`superior`)."""
    margin = float(verdict.get("margin", 0.0))
    return margin if verdict.get("rule") == "superior" else -margin


def _baseline_name(facts: Facts) -> str:
    """Describe the champion as the registry recorded it at the time of the evaluation."""
    baseline, champion = facts.verdict.get("baseline"), facts.champion
    if not baseline:
        return ""
    bundle = baseline.get("bundle")
    if not bundle:
        return "the task’s own baseline"
    if champion.get("bundle") != bundle:  # a run of an older version
        return f"the champion {short(bundle)}"
    by = f" by {champion['by']}" if champion.get("by") else ""
    registry = f", fetched from the registry {champion['registry']}" if champion.get("registry") else ""
    since = f"champion since {champion.get('at', '?')}{by}: {champion.get('reason', '')}{registry}"
    return f"the champion {short(bundle)} of run {champion.get('run', '?')} ({since})"


def _metric_rows(facts: Facts) -> list[dict[str, Any]]:
    """One row per metric with its intervals; each difference is drawn on a separate scale."""
    candidate, baseline = facts.metrics.get("candidate") or {}, facts.metrics.get("baseline")
    intervals = facts.metrics.get("intervals") or {}
    differences = (intervals.get("difference") or {}) if baseline else {}
    lower, undefined = facts.metrics.get("lower_is_better") or (), facts.metrics.get("undefined") or {}
    rows = []
    for name, value in sorted(candidate.items()):
        difference = parse_range(differences.get(name))
        rows.append(
            {
                "name": name,
                "undefined": undefined.get(name),
                "lower_is_better": name in lower,
                "candidate": value,
                "candidate_interval": _bounds(intervals.get("candidate"), name),
                "has_baseline": bool(baseline),
                "baseline": (baseline or {}).get(name),
                "baseline_interval": _bounds(intervals.get("baseline"), name),
                "compared": any(parse_range(bounds) for bounds in differences.values()),
                "difference": interval_text(difference) or "–",
                "chart": small_interval(difference, shared_axis([difference])),
            }
        )
    return rows


def _bounds(intervals: Mapping[str, Any] | None, name: str) -> list[float] | None:
    bounds = (intervals or {}).get(name)
    valid = [value for value in bounds if is_number(value)] if isinstance(bounds, list) else []
    return valid if len(valid) == 2 else None


def slices(facts: Facts) -> Html | None:
    """One table, failed slices first, with all intervals on one scale."""
    if not facts.slices:
        return None
    ranges = [parse_range(slice_.get("difference")) for slice_ in facts.slices]
    axis = shared_axis(ranges)
    rows = [_slice_row(slice_, difference, axis) for slice_, difference in zip(facts.slices, ranges, strict=True)]
    rows.sort(key=lambda row: (row["passed"], not row["evaluated"]))
    evaluated = [row for row in rows if row["evaluated"]]
    return render(
        "slices.html",
        total=len(rows),
        compared=any(row["baseline"] is not None for row in rows),
        evaluated=len(evaluated),
        failed=sum(not row["passed"] for row in evaluated),
        rows=rows[:_MAX_SLICES],
        omitted=max(len(rows) - _MAX_SLICES, 0),
    )


def _slice_row(body: Mapping[str, Any], difference: Range | None, axis: Axis | None) -> dict[str, Any]:
    keys = ("samples", "candidate", "baseline", "adjusted_p")
    return {
        **{key: body.get(key) for key in keys},
        "name": str(body.get("slice", "")),
        "difference": interval_text(difference),
        "chart": small_interval(difference, axis),
        "evaluated": bool(body.get("judged")),
        "passed": bool(body.get("passed", True)),
        "detail": str(body.get("detail") or ""),
    }


def confusion(facts: Facts) -> Html | None:
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
    return render(
        "confusion.html",
        classes=classes,
        rows=[_matrix_row(row, i, largest) for i, row in enumerate(matrix)],
        drawn=len(classes) <= _MAX_MATRIX_CLASSES,
        total=sum(map(sum, matrix)),
        wrong=sum(count for count, _, _ in errors),
        confusions=[
            (f"{actual} taken for {predicted}", number(n)) for n, actual, predicted in errors[:_MAX_CONFUSIONS]
        ],
    )


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


def per_class(facts: Facts) -> Html | None:
    rows = facts.metrics.get("per_class")
    if not rows:
        return None
    rows_by_class = [(name, rows[name]) for name in facts.classes if name in rows]
    return render("per_class.html", rows=[(name, dict(row)) for name, row in rows_by_class])


_SIDE, _LEFT, _TOP = 300, 44, 10  # of the square that holds the calibration curve
_COUNTS_HEIGHT = 54  # of the bars below it
_WIDTH, _HEIGHT = _LEFT + _SIDE + 12, _TOP + _SIDE + _COUNTS_HEIGHT + 52
_MODEL_STYLES = {"candidate": "one", "baseline": "two other"}

Bins = Sequence[Mapping[str, Any]]


def calibration(facts: Facts) -> Html | None:
    curves = {name: bins for name in _MODEL_STYLES if (bins := _bins(facts.calibration.get(name)))}
    if not curves:
        return None
    models = [name for name in _MODEL_STYLES if isinstance(facts.calibration.get(name), dict)]
    scores = [
        (title, *[number(facts.calibration[name].get(key)) for name in models])
        for key, title in (("ece", "expected calibration error"), ("brier", "Brier score"))
    ]
    numbers = [
        (
            f"{bin_.get('low', 0):.2f} to {bin_.get('high', 1):.2f}",
            number(_count(bin_)),
            percent(bin_["confidence"]),
            percent(bin_["accuracy"]),
        )
        for bin_ in next(iter(curves.values()))
    ]
    legend = [(name, _MODEL_STYLES[name]) for name in curves]
    chart = _calibration_chart(curves)
    return render("calibration.html", legend=legend, chart=chart, models=models, scores=scores, numbers=numbers)


def _bins(body: Any) -> list[dict[str, Any]]:
    bins = mappings(body.get("bins")) if isinstance(body, dict) else []
    return [bin_ for bin_ in bins if is_number(bin_.get("confidence")) and is_number(bin_.get("accuracy"))]


def _count(bin_: Mapping[str, Any]) -> int:
    return int(bin_.get("count", bin_.get("samples", 0)) or 0)


def _calibration_chart(curves: Mapping[str, Bins]) -> Html:
    x = Axis(0, 1, _LEFT, _LEFT + _SIDE)
    y = Axis(0, 1, _TOP + _SIDE, _TOP)
    model, bins = next(iter(curves.items()))
    parts = [
        _calibration_grid(x, y),
        [_calibration_curve(name, points, x, y) for name, points in curves.items()],
        _count_bars(model, bins, x),
    ]
    points = ", ".join(f"{percent(bin_['confidence'])} stated and {percent(bin_['accuracy'])} right" for bin_ in bins)
    return drawing("Calibration curve", f"{model}: {points}", parts, _WIDTH, _HEIGHT, "square")


def _calibration_grid(x: Axis, y: Axis) -> Iterator[Html]:
    for value in (0, 0.25, 0.5, 0.75, 1):
        yield svg_line(_LEFT, y.at(value), _LEFT + _SIDE, y.at(value), "grid")
        yield label(_LEFT - 8, y.at(value) + 4, tick_text(value), "tick left")
        yield label(x.at(value), _HEIGHT - 22, tick_text(value), "tick")
    yield svg_line(x.at(0), y.at(0), x.at(1), y.at(1), "zero")
    yield label(x.at(0.5), _HEIGHT - 4, "stated confidence; bars: number of answers", "tick")


def _calibration_curve(name: str, bins: Bins, x: Axis, y: Axis) -> Iterator[Html]:
    style = _MODEL_STYLES[name]
    points = [(x.at(bin_["confidence"]), y.at(bin_["accuracy"])) for bin_ in bins]
    yield el("path", d="M" + "L".join(f"{px(a)} {px(b)}" for a, b in points), class_=f"curve {style}")
    for item, (a, b) in zip(bins, points, strict=True):
        confidence, accuracy = percent(item["confidence"]), percent(item["accuracy"])
        text = f"{name}: {confidence} stated, {accuracy} right, {number(_count(item))} answers"
        yield el("circle", el("title", text), cx=px(a), cy=px(b), r=3.4, class_=f"dot {style}")


def _count_bars(name: str, bins: Bins, x: Axis) -> Iterator[Html]:
    top, floor = max(map(_count, bins)) or 1, _TOP + _SIDE + 8 + _COUNTS_HEIGHT
    for bin_ in bins:
        low, high = bin_.get("low", 0.0), bin_.get("high", 1.0)
        height = max(_COUNTS_HEIGHT * _count(bin_) / top, 0.8 if _count(bin_) else 0.0)
        x_position, width = px(x.at(low) + 1), px(x.at(high) - x.at(low) - 2)
        title = el("title", f"{name}: {number(_count(bin_))} answers from {low:.2f} to {high:.2f}")
        yield el("rect", title, x=x_position, y=px(floor - height), width=width, height=px(height), class_="count")
