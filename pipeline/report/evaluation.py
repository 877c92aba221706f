"""The verdict: its interval, the rules it came from, and the numbers behind it.

Whether stated probabilities are true: the calibration curve with how many answers each point rests on.

Where a classifier errs: the confusion matrix, and each class by itself.

Parts of the test set judged by themselves: a table with each interval drawn on one scale.

The samples the candidate does worst on, as evaluate kept them: pictures, texts or plain numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from pipeline.contract.facts import Facts, is_number, mappings
from pipeline.contract.html import Child, Html, el, number, percent, short, signed, table
from pipeline.report.charts import (
    Axis,
    drawing,
    interval_chart,
    interval_text,
    label,
    px,
    range_of,
    shared_axis,
    small_interval,
    svg_line,
    tick_text,
)


def verdict(facts: Facts) -> Child:
    body = facts.verdict
    if not body:
        return None
    return [
        el("p", f"The gate rejected this model. It was {facts.excuse}.", class_="note warn") if facts.excuse else None,
        _interval(facts),
        _rules(mappings(body.get("rules"))),
        [el("p", el("b", "In doubt: "), str(text), class_="muted") for text in body.get("warnings") or ()],
        _metrics(facts),
        _tests(body),
    ]


def bound_of(verdict: dict[str, Any]) -> float:
    """What the interval's lower end must lie above: below zero unless the candidate has to be the better one."""
    margin = verdict.get("margin", 0.0)
    return float(margin) if verdict.get("rule") == "superior" else -float(margin)


def _interval(facts: Facts) -> Child:
    baseline, difference = facts.verdict.get("baseline"), range_of(facts.verdict.get("difference"))
    if not baseline:
        return el("p", "Nothing to compare with: no champion is registered and the task has no baseline().")
    who = _champion(facts, baseline["bundle"]) if baseline.get("bundle") else "the task’s own baseline"
    if difference is None:
        return el("p", f"No interval: the difference to {who} is not a finite number.", class_="note bad")
    level = f"{facts.verdict.get('confidence', 0):.0%}"
    note = (
        f"Mean difference in {facts.verdict.get('metric')} to {who}, on the same "
        f"{number(facts.verdict.get('samples'))} samples, with its {level} bootstrap interval. "
        "The interval must stay clear of the shaded side." + _detectable(facts.verdict.get("detectable"))
    )
    bound = bound_of(facts.verdict)
    drawn = interval_chart(difference, bound, f"margin {signed(bound)}", "equal to baseline")
    return [el("p", note, class_="muted"), drawn]


def _champion(facts: Facts, bundle: str) -> str:
    """As the registry had it when it was judged against."""
    told = facts.rival
    if told.get("bundle") != bundle:  # an older version did not write it down
        return f"the champion {short(bundle)}"
    copied = f", fetched from the registry {told['registry']}" if told.get("registry") else ""
    since = f"champion since {told.get('at', '?')}" + (f" by {told['by']}" if told.get("by") else "")
    return f"the champion {short(bundle)} of run {told.get('run', '?')} ({since}: {told.get('reason', '')}{copied})"


def _detectable(difference: float | None) -> str:
    if difference is None:
        return ""
    return (
        f" The smallest true difference that four of five test sets like this one would show is {number(difference)}."
    )


def _rules(rules: list[dict[str, Any]]) -> Html | None:
    items = [
        el("li", mark(rule.get("passed")), el("div", el("b", str(rule.get("rule", ""))), el("span", _reasons(rule))))
        for rule in rules
    ]
    return el("ul", items, class_="rules") if items else None


def _reasons(rule: dict[str, Any]) -> list[Child]:
    """Of a failed rule also what would have passed it; how each is measured, `pipe gate explain` tells."""
    change = str(rule.get("change") or "")
    return [str(rule.get("detail", "")), el("small", change) if change and not rule.get("passed") else None]


def mark(passed: Any) -> Html:
    """Told by its shape, and in words to those who do not see it."""
    kind, sign, word = ("good", "✓", "passed") if passed else ("bad", "✕", "failed")
    return el("span", sign, class_=f"sign {kind}", role="img", aria_label=word)


def _metrics(facts: Facts) -> Html | None:
    """Each with its interval, and the difference drawn on a scale of its own."""
    candidate, baseline = facts.metrics.get("candidate"), facts.metrics.get("baseline")
    if not candidate:
        return None
    bounds = facts.metrics.get("intervals") or {}
    apart = {name: range_of(one) for name, one in (bounds.get("difference") or {}).items()} if baseline else {}
    compared = any(apart.values())
    head = ["metric", "candidate"] + (["baseline"] if baseline else []) + (["better by", ""] if compared else [])
    rows = []
    for name, value in sorted(candidate.items()):
        row: list[Child] = [_named(name, facts), _bounded(value, (bounds.get("candidate") or {}).get(name))]
        if baseline:
            row.append(_bounded(baseline.get(name), (bounds.get("baseline") or {}).get(name)))
        if compared:
            found = apart.get(name)
            row += [interval_text(found) or "–", small_interval(found, shared_axis([found]))]
        rows.append(row)
    return table(head, rows)


def _named(name: str, facts: Facts) -> Child:
    why = (facts.metrics.get("undefined") or {}).get(name)
    lower = name in (facts.metrics.get("lower_is_better") or ())
    note = f"undefined: {why}" if why else "lower is better" if lower else None
    return [name, el("small", note)] if note else name


def _bounded(value: float | None, bounds: Any) -> Child:
    known = [one for one in bounds if is_number(one)] if isinstance(bounds, list) else []
    interval = f" [{number(known[0])}, {number(known[1])}]" if len(known) == 2 else ""
    return [number(value), el("small", interval, class_="beside")] if interval else number(value)


def _tests(body: dict[str, Any]) -> Html | None:
    told = []
    if isinstance(test := body.get("mcnemar"), dict):
        told.append(
            f"McNemar’s exact test: {number(test.get('only_candidate'))} samples only the candidate gets right, "
            f"{number(test.get('only_baseline'))} only the baseline; p = {number(test.get('p_value'))}."
        )
    if is_number(p_value := body.get("p_value")):
        told.append(f"Permutation test of the mean difference: p = {number(p_value)}.")
    return el("p", " ".join(told), class_="muted") if told else None


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
        yield svg_line(_LEFT, y.at(value), _LEFT + _SIDE, y.at(value), "grid")
        yield label(_LEFT - 8, y.at(value) + 4, tick_text(value), "tick left")
        yield label(x.at(value), _HEIGHT - 22, tick_text(value), "tick")
    yield svg_line(x.at(0), y.at(0), x.at(1), y.at(1), "zero")
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


_LARGEST_MATRIX = 30  # classes; beyond that only the confusions that happen are listed
_LISTED_CLASSES = 12


def confusion(facts: Facts) -> Child:
    matrix, classes = facts.metrics.get("confusion"), facts.metrics.get("classes")
    if not matrix or not classes:
        return None
    grid = _matrix(matrix, classes) if len(classes) <= _LARGEST_MATRIX else None
    return el("div", grid, _most_confused(matrix, classes), class_="split")


def per_class(facts: Facts) -> Child:
    rows = facts.metrics.get("per_class")
    if not rows:
        return None
    names = ("precision", "recall", "f1")
    known = [(name, rows[name]) for name in facts.classes if name in rows]
    body = [(name, number(row.get("samples")), *(_bar(row.get(key)) for key in names)) for name, row in known]
    return table(["class", "samples", *names], body)


def _matrix(matrix: list[list[int]], classes: list[str]) -> Html:
    """Right answers and errors have each their own colour and scale, or the errors would not show."""
    errors = max((n for i, row in enumerate(matrix) for j, n in enumerate(row) if i != j), default=0)
    head = el("tr", el("th"), [el("th", name, scope="col") for name in classes])
    rows = []
    for i, (name, row) in enumerate(zip(classes, matrix, strict=False)):
        cells = [_cell(n, n / (sum(row) or 1) if i == j else n / (errors or 1), i == j) for j, n in enumerate(row)]
        rows.append(el("tr", el("th", name, scope="row"), cells))
    caption = el("caption", "actual class by row, predicted by column")
    return el("div", el("table", caption, el("thead", head), el("tbody", rows), class_="heat"), class_="scroll")


def _cell(count: int, share: float, right: bool) -> Html:
    strength = f"{(0.12 + 0.88 * share) * 100:.0f}%" if count else "0%"
    kind = ("right" if right else "wrong") + ((" strong" if share > 0.55 else " some") if count else "")
    return el("td", count if count or right else "·", class_=kind, style=f"--strength:{strength}")


def _most_confused(matrix: list[list[int]], classes: list[str]) -> Html:
    pairs = [(n, classes[i], classes[j]) for i, row in enumerate(matrix) for j, n in enumerate(row) if i != j and n]
    total, wrong = sum(map(sum, matrix)), sum(n for n, _, _ in pairs)
    summary = f"{number(wrong)} of {number(total)} samples are answered wrongly."
    pairs.sort(key=lambda pair: -pair[0])
    rows = [(f"{actual} taken for {predicted}", number(n)) for n, actual, predicted in pairs[:_LISTED_CLASSES]]
    listing = table(["confusion", "samples"], rows) if rows else None
    return el("div", el("p", summary), listing)


def _bar(value: float | None) -> Html:
    width = f"{(value or 0) * 100:.1f}%"
    return el("div", el("span", percent(value)), el("i", style=f"width:{width}"), class_="bar")


_HEAD = ["slice", "samples", "candidate", "baseline", "difference", "", "adjusted p", "outcome"]
_LISTED_SLICES = 100


def slices(facts: Facts) -> Child:
    found = facts.slices
    if not found:
        return None
    x = shared_axis([range_of(one.get("difference")) for one in found])
    judged = [one for one in found if one.get("judged")]
    failed = [one for one in judged if not one.get("passed")]
    outcome = f"{len(failed)} of them failed" if failed else "none of them failed"
    text = (
        f"{number(len(found))} slices of the test set, {number(len(judged))} large enough to be judged, {outcome}. "
        "Differences in the compared metric to the baseline, with intervals and p values that allow for how many were "
        "looked at; the line is no difference."
    )
    ordered = sorted(found, key=lambda one: (bool(one.get("passed", True)), not one.get("judged")))
    rows = [_row(one, x) for one in ordered[:_LISTED_SLICES]]
    more = (
        el("p", f"{len(ordered) - _LISTED_SLICES} more are in evaluate/verdict.json.")
        if len(ordered) > _LISTED_SLICES
        else None
    )
    return [el("p", text, class_="muted"), table(_HEAD, rows, words=(7,)), more]


def _row(one: dict[str, Any], x: Axis | None) -> list[Child]:
    found = range_of(one.get("difference"))
    return [
        str(one.get("slice", "")),
        number(one.get("samples")),
        number(one.get("candidate")),
        number(one.get("baseline")),
        interval_text(found),
        small_interval(found, x),
        number(one.get("adjusted_p")),
        _outcome(one),
    ]


def _outcome(one: dict[str, Any]) -> Html:
    """In words, with the reason at hand."""
    detail = str(one.get("detail") or "")
    if not one.get("judged"):
        return el("span", "not judged", title=detail or None, class_="muted-text")
    if one.get("passed"):
        return el("span", "✓ passed", title=detail or None, class_="good-text")
    return el("span", "✕ failed", el("small", detail), class_="bad-text words")


_BASE64 = re.compile(r"[A-Za-z0-9+/]+={0,2}")


def worst(facts: Facts) -> Child:
    samples = mappings(facts.worst.get("samples"))
    if not samples:
        return None
    metric = str(facts.worst.get("metric", ""))
    text = f"What the candidate does worst on by {metric}; among equals the other metrics decide."
    note = str(facts.worst.get("note") or "")
    wide = any(shown.get("kind") == "text" for one in samples for shown in mappings(one.get("shown")))
    cards = [_card(one, bool(facts.classes)) for one in samples]
    return [el("p", " ".join(filter(None, (text, note))), class_="muted"), el("div", cards, class_=_layout(wide))]


def _layout(wide: bool) -> str:
    return "worst texts" if wide else "worst"


def _card(one: dict[str, Any], classes: bool) -> Html:
    shown = [_shown(part, one.get("index")) for part in mappings(one.get("shown"))]
    values = [f"{name} {number(value)}" for name, value in (one.get("metrics") or {}).items()]
    caption = el(
        "figcaption",
        el("b", f"Sample {number(one.get('index'))}"),
        _answers(one, classes),
        el("small", ", ".join(values)) if values else None,
    )
    return el("figure", shown, caption)


def _answers(one: dict[str, Any], classes: bool) -> Html | None:
    actual, predicted, baseline = (one.get(key) for key in ("actual", "predicted", "baseline_predicted"))
    if actual is None or predicted is None:
        return None
    if not classes:
        said = f"is {actual}, predicted {predicted}"
    else:
        said = f"is {actual}, " + ("recognised" if predicted == actual else f"taken for {predicted}")
    return el("span", said, f"; baseline: {baseline}" if baseline is not None else None)


def _shown(part: dict[str, Any], index: Any) -> Html:
    name, kind = str(part.get("name", "")), part.get("kind")
    png = str(part.get("png", ""))
    if kind == "picture" and _BASE64.fullmatch(png):
        return el("img", src=f"data:image/png;base64,{png}", alt=f"{name} of sample {index}")
    if kind == "text":
        return el("blockquote", str(part.get("text", "")), "" if part.get("whole", True) else " …")
    values = [number(value, 3) for value in part.get("values") or ()]
    more = " …" if part.get("count", 0) > len(values) else ""
    return el("p", el("span", f"{name} "), el("code", ", ".join(values), more), class_="values")
