"""The verdict: its interval, the rules it came from, and the numbers behind it."""

from __future__ import annotations

from typing import Any

from pipeline.report.intervals import interval_chart, interval_text, range_of, shared_axis, small_interval
from pipeline.spec.facts import Facts, is_number, mappings
from pipeline.spec.html import Child, Html, el, table
from pipeline.spec.wording import number, short, signed


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
