"""The outcome of a run, and sections on the verdict: rules, differences to the baseline, and slices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.contract.results import Body, Facts, is_number, mappings
from pipeline.contract.run import STEPS
from pipeline.report.charts import Chart, Range, interval_chart, parse_range, shared_axis
from pipeline.system.wording import short, signed

_MAX_SLICES = 100  # shown

STATUS_SIGNS = {
    "done": ("good", "✓"),
    "failed": ("bad", "✕"),
    "rejected": ("bad", "✕"),
    "overridden": ("warn", "✕"),
    "interrupted": ("warn", "‖"),
    "pruned": ("warn", "‖"),
    "running": ("live", "•"),
    "died": ("bad", "✕"),
}


@dataclass(frozen=True)
class Outcome:
    """How a run ended: the verdict of the gate, unless a step stopped it before or after that."""

    verdict: str  # of the gate; empty before it
    step: str = ""  # that failed, was interrupted or is running; empty: none
    status: str = ""
    kind: str = ""
    sign: str = ""

    @property
    def text(self) -> str:
        return f"{self.step.capitalize()} {'is running' if self.status == 'running' else self.status}"


def describe_outcome(facts: Facts) -> Outcome:
    """Return the first step that was stopped by something else than the gate, with the verdict."""
    verdict = facts.effective_verdict
    for name in STEPS:
        record = facts.step(name)
        if record is None or record.current_status in ("done", "overridden"):
            continue
        if name != "evaluate" or record.current_status != "rejected":
            kind, sign = STATUS_SIGNS[record.current_status]
            return Outcome(verdict, name, record.current_status, kind, sign)
    return Outcome(verdict)


def verdict(facts: Facts) -> Body | None:
    body = facts.verdict
    if not body:
        return None
    bound, difference = margin_bound(body), parse_range(body.get("difference"))
    return {
        "pass_reason": facts.pass_reason,
        "verdict": body,
        "level": _level(body),
        "baseline": _baseline_name(facts),
        "chart": _interval(body, difference, bound) if difference else None,
        "rules": mappings(body.get("rules")),
        "metrics": _metric_rows(facts),
        "other_level": _other_level(facts),
        "mcnemar": body.get("mcnemar"),
        "p_value": body.get("p_value") if is_number(body.get("p_value")) else None,
    }


def _interval(verdict: Mapping[str, Any], difference: Range, bound: float) -> Chart:
    opponent = "champion" if (verdict.get("baseline") or {}).get("kind") == "champion" else "baseline"
    title = f"difference in {verdict.get('metric', 'the metric')} to the {opponent}, positive is better"
    rule = f"{verdict['rule']}: " if verdict.get("rule") else ""
    return interval_chart(difference, bound, f"{rule}margin {signed(bound)}", f"equal to {opponent}", title)


def _level(verdict: Mapping[str, Any]) -> str:
    """Return the level of the interval, and which comparison on the test set it is, unless it is the first."""
    comparison = verdict.get("comparison")
    if not isinstance(comparison, Mapping):  # without a baseline
        return f"{verdict.get('confidence', 0):.0%} interval"
    return f"{comparison.get('level')} interval" + (
        f" ({comparison.get('text')})" if comparison.get("number") != 1 else ""
    )


def _other_level(facts: Facts) -> str:
    """Return the level of the intervals of the other metrics where it is not that of the verdict."""
    level, verdict = (facts.metrics.get("intervals") or {}).get("confidence"), facts.verdict.get("confidence")
    return f"{level:.0%}" if is_number(level) and is_number(verdict) and abs(level - verdict) > 1e-9 else ""


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
    if champion.get("bundle") != bundle:  # champion.json is missing or damaged
        return f"the champion {short(bundle)}"
    by = f" by {champion['by']}" if champion.get("by") else ""
    registry = f", fetched from the registry {champion['registry']}" if champion.get("registry") else ""
    since = f"champion since {champion.get('at', '?')}{by}: {champion.get('reason', '')}{registry}"
    return f"the champion {short(bundle)} of run {champion.get('run', '?')} ({since})"


def _metric_rows(facts: Facts) -> list[dict[str, Any]]:
    """One row per metric with its intervals; each difference is drawn on a separate scale."""
    intervals = facts.metrics.get("intervals") or {}
    differences = dict(intervals.get("difference") or {}) if facts.baseline else {}
    if facts.verdict.get("metric") in differences:  # one difference has one interval, that of the verdict
        differences[facts.verdict["metric"]] = facts.verdict.get("difference")
    lower, undefined = facts.metrics.get("lower_is_better") or (), facts.metrics.get("undefined") or {}
    rows = []
    for name, value in sorted(facts.candidate.items()):
        rows.append(
            {
                "name": name,
                "undefined": undefined.get(name),
                "lower_is_better": name in lower,
                "candidate": value,
                "candidate_interval": _bounds(intervals.get("candidate"), name),
                "has_baseline": bool(facts.baseline),
                "baseline": facts.baseline.get(name),
                "baseline_interval": _bounds(intervals.get("baseline"), name),
                "compared": any(parse_range(bounds) for bounds in differences.values()),
                "difference": parse_range(differences.get(name)),
            }
        )
    return rows


def _bounds(intervals: Mapping[str, Any] | None, name: str) -> list[float] | None:
    bounds = (intervals or {}).get(name)
    valid = [value for value in bounds if is_number(value)] if isinstance(bounds, list) else []
    return valid if len(valid) == 2 else None


def slices(facts: Facts) -> Body | None:
    """One table, failed slices first, with all intervals on one scale."""
    if not facts.slices:
        return None
    ranges = [parse_range(slice_.get("difference")) for slice_ in facts.slices]
    rows = [_slice_row(slice_, difference) for slice_, difference in zip(facts.slices, ranges, strict=True)]
    rows.sort(key=lambda row: (row["passed"], not row["evaluated"]))
    evaluated = [row for row in rows if row["evaluated"]]
    return {
        "total": len(rows),
        "axis": shared_axis(ranges),
        "compared": any(row["baseline"] is not None for row in rows),
        "evaluated": len(evaluated),
        "failed": sum(not row["passed"] for row in evaluated),
        "reason": _common_reason(rows) if not evaluated else "",
        "rows": rows[:_MAX_SLICES],
        "omitted": max(len(rows) - _MAX_SLICES, 0),
    }


def _common_reason(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return why no slice was evaluated, as most of their details have it after the value."""
    reasons = [row["detail"].rpartition("; ")[2] for row in rows if row["samples"] and row["detail"]]
    most_frequent = max(reasons, key=reasons.count, default="")
    return most_frequent.removesuffix("not evaluated").rstrip(",;: ")


def _slice_row(body: Mapping[str, Any], difference: Range | None) -> dict[str, Any]:
    keys = ("samples", "candidate", "baseline", "adjusted_p")
    return {
        **{key: body.get(key) for key in keys},
        "name": str(body.get("slice", "")),
        "difference": difference,
        "evaluated": bool(body.get("judged")),
        "passed": bool(body.get("passed", True)),
        "detail": str(body.get("detail") or ""),
    }
