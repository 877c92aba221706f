"""A verdict in sentences: every rule with its numbers, and what the test set could show at all; pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from evaluate.rule import samples_needed

Body = Mapping[str, Any]


def explain(verdict: Body, override: Body | None) -> dict[str, Any]:
    """What `-o json` prints; keys that an older run does not have are absent or None."""
    return {
        "verdict": verdict["verdict"],
        "summary": verdict["summary"],
        "override": override,
        "rules": [dict(rule) for rule in verdict["rules"]],
        "power": _power(verdict),
        "tests": {"permutation_p": verdict.get("p_value"), "mcnemar": verdict.get("mcnemar")},
        "slices": verdict.get("slices") or [],
        "warnings": list(verdict.get("warnings") or ()),
    }


def sentences(found: Body) -> Iterator[str]:
    yield f"{found['verdict']}: {found['summary']}"
    if found["override"]:
        yield f"overridden by {found['override']['by']}, {found['override']['at']}: {found['override']['reason']}"
    for rule in found["rules"]:
        yield ""
        yield f"{'passed' if rule['passed'] else 'FAILED'}  {rule['rule']}: {rule['detail']}"
        if rule.get("how"):
            yield f"        how: {rule['how']}"
        if rule.get("change"):
            yield f"        what would change it: {rule['change']}"
    yield from _slice_lines(found["slices"])
    yield ""
    yield from _test_lines(found)
    yield from (f"warning: {warning}" for warning in found["warnings"])


def _power(verdict: Body) -> dict[str, Any] | None:
    """What differences so many samples show, and how many it would take for the margin."""
    detectable, samples, margin = verdict.get("detectable"), verdict["samples"], verdict["margin"]
    if detectable is None:
        return None
    needed = samples_needed(samples, detectable, margin)
    return {"samples": samples, "detectable": detectable, "margin": margin, "samples_for_margin": needed}


def _slice_lines(slices: list[Body]) -> Iterator[str]:
    if slices:
        yield ""
        yield "slices:"
    for one in slices:
        state = ("passed" if one["passed"] else "FAILED") if one["judged"] else "told  "
        yield f"  {state}  {one['slice']} ({one['samples']} samples): {one['detail']}"


def _test_lines(found: Body) -> Iterator[str]:
    power, tests = found["power"], found["tests"]
    if power is None:
        yield "power: unknown, there is nothing to compare with or too little of it"
    else:
        enough = power["samples_for_margin"]
        told = "no number of samples shows a margin of 0" if enough is None else f"a margin of {power['margin']:g} takes about {enough}"  # fmt: skip  # noqa: E501
        yield (
            f"power: {power['samples']} samples show a true difference of {power['detectable']:.4g} in four of five "
            f"such test sets; {told}"
        )
    if tests["permutation_p"] is not None:
        yield f"permutation test: p = {tests['permutation_p']:.4g} that which model gave which answer is a toss-up"
    if tests["mcnemar"]:
        one = tests["mcnemar"]
        yield (
            f"McNemar's exact test: p = {one['p_value']:.4g}; {one['only_candidate']} samples only the candidate gets "
            f"right, {one['only_baseline']} only the baseline"
        )
