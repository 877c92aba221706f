"""The top of the page: name, verdict, key numbers, and the road with how far the run came."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.contract.facts import Facts, mappings
from pipeline.contract.html import MISSING, Html, el, number, percent, seconds, signed
from pipeline.contract.run import STEPS, StepRecord
from pipeline.report.charts import range_of

VERDICTS = {
    "pass": ("good", "✓", "Passed"),
    "fail": ("bad", "✕", "Rejected"),
    "no-baseline": ("warn", "○", "No baseline"),
    "forced": ("warn", "!", "Forced"),
    "overridden": ("warn", "!", "Overridden"),
}
_UNJUDGED = ("none", "–", "Not judged yet")
_STATUS = {
    "done": ("good", "✓"),
    "failed": ("bad", "✕"),
    "rejected": ("bad", "✕"),
    "overridden": ("warn", "✕"),
    "interrupted": ("warn", "‖"),
    "pruned": ("warn", "‖"),
    "running": ("live", "•"),
}


def headline(facts: Facts) -> Html:
    return el(
        "header",
        el("p", "Run ", el("code", facts.file.id), f" · {date(facts.file.created)}", class_="eyebrow"),
        el("h1", facts.name),
        el(
            "div",
            el("p", stamp(facts.standing), class_="decision"),
            el("p", _lead(facts), class_="lead"),
            el("div", [_tile(*tile) for tile in _tiles(facts)], class_="tiles"),
            class_="summary",
        ),
    )


def stamp(standing: str) -> Html:
    """The verdict as a word with its sign: never by colour alone."""
    kind, sign, word = VERDICTS.get(standing, _UNJUDGED)
    return el("span", el("i", sign, aria_hidden="true"), f" {word}", class_=f"stamp {kind}")


def road(facts: Facts) -> Html:
    return el("ol", [_stop(name, facts.step(name)) for name in STEPS], class_="road", aria_label="the road")


def stopped(facts: Facts) -> list[Html]:
    """Why a run ended early, and what could not be read."""
    ended = [record for record in facts.file.steps.values() if record.status in ("failed", "rejected", "interrupted")]
    notes = [
        el("p", el("b", f"{one.step} {one.status}. "), one.reason.removeprefix(f"{one.step}: "), class_="note bad")
        for one in ended
    ]
    notes += [
        el("p", el("b", f"{name} "), "is damaged and left out here.", class_="note bad") for name in facts.damaged
    ]
    return notes


def score(metric: str, value: float | None) -> str:
    return percent(value) if "accuracy" in metric else number(value)


def date(created: str) -> str:
    return created.replace("T", " ").partition("+")[0][:16] + (" UTC" if created.endswith("+00:00") else "")


def _lead(facts: Facts) -> str:
    summary = str(facts.verdict.get("summary") or "the evaluate step has not finished in this run.")
    return ". ".join(text[:1].upper() + text[1:] for text in (summary, facts.excuse) if text)


def _tile(name: str, value: str, note: str = "") -> Html:
    return el("div", el("span", name), el("strong", value), el("small", note) if note else None, class_="tile")


def _tiles(facts: Facts) -> Iterator[tuple[str, str, str]]:
    yield from _judged(facts)
    if facts.summary:
        spent = f"{number(facts.summary.get('steps'))} steps, {number(facts.summary.get('epochs'))} epochs"
        yield "training", seconds(facts.summary.get("seconds")), spent
        where = f"{facts.summary.get('world_size', '?')} × {str(facts.summary.get('device', '?')).upper()}"
        yield "throughput", number(facts.summary.get("samples_per_second")), f"samples/s on {where}"
    if runs := mappings(facts.parity.get("runs")):
        worst = max(run.get("max_abs_error") or 0.0 for run in runs)
        yield "ONNX parity", number(worst), "largest difference"
    if latency := facts.deploy.get("latency_ms"):
        yield "latency", f"{number(latency.get('p50'), 3)} ms", f"p95 {number(latency.get('p95'), 3)} ms"


def _judged(facts: Facts) -> Iterator[tuple[str, str, str]]:
    metric = str(facts.verdict.get("metric", ""))
    value = (facts.metrics.get("candidate") or {}).get(metric)
    if not metric:
        return
    baseline = (facts.metrics.get("baseline") or {}).get(metric)
    against = (
        f"baseline {score(metric, baseline)}" if baseline is not None else f"{facts.metrics.get('samples')} samples"
    )
    yield metric, score(metric, value), against
    if found := range_of(facts.verdict.get("difference")):
        yield "against baseline", signed(found.estimate), f"{signed(found.low)} to {signed(found.high)}"


def _stop(name: str, record: StepRecord | None) -> Html:
    if record is None:
        kind, sign, note = "none", "", "not reached"
    else:
        kind, sign = _STATUS[record.status]
        note = f"reused from {record.reused_from}" if record.reused_from else seconds(record.seconds)
        note = note if record.status == "done" else f"{record.status} · {note}"
    reason = record.reason if record else None
    return el(
        "li", el("i", sign, aria_hidden="true"), el("b", name), el("span", note or MISSING), class_=kind, title=reason
    )
