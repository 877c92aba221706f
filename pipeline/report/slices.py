"""Parts of the test set judged by themselves: a table with each interval drawn on one scale."""

from __future__ import annotations

from typing import Any

from pipeline.report.intervals import interval_text, range_of, shared_axis, small_interval
from pipeline.report.scale import Axis
from pipeline.spec.facts import Facts
from pipeline.spec.html import Child, Html, el, table
from pipeline.spec.wording import number

_HEAD = ["slice", "samples", "candidate", "baseline", "difference", "", "adjusted p", "outcome"]
_LISTED = 100


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
    rows = [_row(one, x) for one in ordered[:_LISTED]]
    more = el("p", f"{len(ordered) - _LISTED} more are in evaluate/verdict.json.") if len(ordered) > _LISTED else None
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
