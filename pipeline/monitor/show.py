"""A look in the terminal, as JSON, as gauges for Prometheus' textfile collector, and as a page."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pipeline.monitor.look import Finding, Report
from pipeline.report.charts import Range
from pipeline.report.page import read_asset, render
from pipeline.system.files import write_atomic
from pipeline.system.wording import number

_COUNTS = {
    "samples": "samples",
    "samples_repeated": "repeated samples",
    "samples_other_bundle": "samples of another bundle",
    "answers_unread": "samples whose answer the task cannot read",
    "samples_waiting": "samples that wait for a label",
    "labels_counted": "labels counted",
    "labels_repeated": "repeated labels",
    "labels_rejected": "rejected labels",
    "labels_without_sample": "labels without a sample",
    "labels_other_bundle": "labels of another bundle's samples",
}


def facts(report: Report) -> dict[str, Any]:
    """Return what `-o json` prints."""
    given = {name: value for name, value in vars(report).items() if name != "findings"}
    rules = [finding.body() for finding in report.findings]
    return {"verdict": report.verdict, "summary": summary(report), "rules": rules, **given}


def summary(report: Report) -> str:
    if report.verdict == "not evaluated":
        return f"no sample of this bundle in {report.source} yet"
    if not report.failures:
        return f"as promised, by {report.counts['samples']} samples and {report.counts['labels_counted']} labels"
    first = report.failures[0]
    return f"{first.rule.rule} changed first, about {moment(first.since)}; {first.rule.detail}"


def moment(seconds: float | None) -> str:
    return "–" if seconds is None else time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))


def describe(report: Report) -> Iterator[str]:
    yield f"run {report.run}, bundle {report.bundle[:12]}"
    yield f"{report.verdict}: {summary(report)}"
    for finding in report.findings:
        yield f"{'passed' if finding.rule.passed else 'FAILED'}  {finding.rule.rule}: {finding.rule.detail}"
        if not finding.rule.passed:
            yield f"        {_times(finding)}"
            yield f"        how: {finding.rule.how}"
    yield ", ".join(f"{value} {_COUNTS[name]}" for name, value in report.counts.items() if value or name == "samples")
    yield from (f"note: {note}" for note in report.notes)
    yield from (f"warning: rejected label {reason}" for reason in report.rejected)
    yield from (f"warning: {name} is damaged and was skipped: {problem}" for name, problem in report.damaged.items())


def _times(finding: Finding) -> str:
    return f"changed about {moment(finding.since)}, certain at {moment(finding.alarm)}"


def write_files(report: Report, folder: Path) -> list[Path]:
    """Write the page and the gauges; return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    page, gauges = folder / "monitor.html", folder / "monitor.prom"
    metric, difference = report.metric, None
    if metric and None not in (metric["value"], metric["low"]):
        difference = Range(*(metric[name] - metric["promised"] for name in ("value", "low", "high")))
    write_atomic(
        page,
        render(
            "monitor.html",
            report=report,
            summary=summary(report),
            rows=[
                {**finding.body(), "since": moment(finding.since), "alarm": moment(finding.alarm)}
                for finding in report.findings
            ],
            difference=difference,
            counts=[(name, number(report.counts[key])) for key, name in _COUNTS.items()],
            looked=moment(report.looked),
            style=read_asset("style.css"),
            script="",
        ),
    )
    write_atomic(gauges, "\n".join(_gauges(report)) + "\n")
    return [page, gauges]


def _gauges(report: Report) -> Iterator[str]:
    rules = [(f'rule="{_escape(finding.rule.rule)}"', finding) for finding in report.findings]
    as_promised = {"pass": 1.0, "fail": 0.0}.get(report.verdict)  # without samples there is none
    yield from _gauge(report, "as_promised", "1 if no rule failed.", [("", as_promised)])
    yield from _gauge(report, "failed", "1 for a rule that failed.", [(n, float(not f.rule.passed)) for n, f in rules])
    tested = [(name, finding.rule) for name, finding in rules if finding.rule.value is not None]
    yield from _gauge(
        report, "e_value", "How strongly the traffic contradicts a rule.", [(n, r.value) for n, r in tested]
    )
    text = "The e-value at which a rule fails."
    yield from _gauge(report, "e_value_limit", text, [(name, rule.limit) for name, rule in tested])
    metric = report.metric or {}
    values = [(f'bound="{name}"', metric.get(name)) for name in ("value", "low", "high", "promised")]
    yield from _gauge(report, "metric", "The metric, its confidence sequence, and what was promised.", values)
    counts = [(f'kind="{name}"', value) for name, value in report.counts.items()]
    yield from _gauge(report, "rows", "Samples and labels in the ledger.", counts)
    yield from _gauge(report, "look_timestamp_seconds", "When the traffic was last checked.", [("", report.looked)])


def _gauge(report: Report, name: str, text: str, values: Sequence[tuple[str, float | None]]) -> Iterator[str]:
    owner = f'model="{_escape(report.model)}",bundle="{report.bundle[:12]}"'
    yield f"# HELP pipe_monitor_{name} {text}"
    yield f"# TYPE pipe_monitor_{name} gauge"
    for labels, value in values:
        if value is not None:
            yield f"pipe_monitor_{name}{{{','.join(filter(None, (owner, labels)))}}} {value:.17g}"


def _escape(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
