"""The report of a run and the index of all runs, each as one HTML file that needs nothing else.

A section is a template and a function of the run's facts that returns its values. A section whose files the run has not
written is marked as not reached. One whose files have another format shows the error and leaves the rest of the page
alone.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined, UndefinedError
from markupsafe import Markup

from pipeline.contract.config import flat_settings
from pipeline.contract.results import Body, Facts, is_number, mappings, read_facts
from pipeline.contract.run import STEPS, Run, StepRecord
from pipeline.history import COMMIT, WORKING_TREE, History
from pipeline.report import classification, comparison, evaluation, export, features, lineage, predictions, training
from pipeline.report.charts import interval_text, parse_range, px, small_interval
from pipeline.report.features import read_champion_profile
from pipeline.system.files import write_atomic
from pipeline.system.wording import MISSING, milliseconds, number, percent, seconds, short, signed, size

_FINISHED = ("done", "rejected", "overridden")  # a step with one of these has written all its files
_SHAPE_ERRORS = (KeyError, TypeError, ValueError, AttributeError, IndexError, ZeroDivisionError, UndefinedError)
Tile: TypeAlias = tuple[str, str, str]  # name, value, note


@dataclass(frozen=True)
class Section:
    title: str
    step: str  # the step that writes its files; empty: the run itself
    template: str
    values: Callable[[], Body | None]  # of the template
    absent: str = ""  # shown if the finished step has left nothing to show; empty: then there is no section


def write_report(run: Run, path: Path, others: Sequence[Run] = ()) -> None:
    """Write whatever the run has reached so far, next to other runs if there are any."""
    facts, other_facts = read_facts(run), [read_facts(other) for other in others]
    compared = [comparison.compare(run, facts, *pair) for pair in zip(others, other_facts, strict=True)]
    labels = comparison.run_labels([run.id, *(other.id for other in others)])
    runs = dict(zip(labels, [facts, *other_facts], strict=True))
    sections = _sections(runs, comparison.adjust_p_values(compared), read_champion_profile(run, facts))
    write_atomic(path, _render_report(facts, sections))


def _render_report(facts: Facts, sections: Iterable[Section]) -> str:
    tiles: list[Tile] = []
    with contextlib.suppress(*_SHAPE_ERRORS):  # the section of the file shows the error
        tiles.extend(_tiles(facts))
    drawn = [
        {"title": section.title, "anchor": re.sub(r"[^a-z]+", "-", section.title.lower()), **content}
        for section in sections
        if (content := _content(section, facts))
    ]
    return render(
        "report.html",
        facts=facts,
        outcome=evaluation.describe_outcome(facts),
        lead=_lead(facts),
        tiles=tiles,
        steps=[_step(name, facts.step(name)) for name in STEPS],
        stopped=[
            (record.step, record.current_status, record.reason.removeprefix(f"{record.step}: "))
            for record in facts.file.steps.values()
            if record.current_status in ("failed", "rejected", "interrupted")
        ],
        sections=drawn,
        style=read_asset("style.css"),
        script="",  # only the index has one
    )


def _sections(
    runs: training.Runs, compared: Sequence[comparison.Comparison], champion_profile: Body
) -> Iterator[Section]:
    facts = next(iter(runs.values()))

    def section(
        title: str, step: str, template: str, values: Callable[[Facts], Body | None], absent: str = ""
    ) -> Section:
        return Section(title, step, template, partial(values, facts), absent)

    if compared:
        title = "Compared with the other run" if len(compared) == 1 else "Compared with other runs"
        yield Section(title, "", "comparison.html", partial(comparison.comparison, runs, compared))
    yield section("Verdict", "evaluate", "verdict.html", evaluation.verdict, "The step has left no verdict.")
    yield section("Slices", "evaluate", "slices.html", evaluation.slices)
    no_log = "The training log has no lines."
    yield Section("Learning curves", "train", "curves.html", partial(training.curves, runs), no_log)
    yield Section("Speed and time", "train", "speed.html", partial(training.speed, runs))
    yield section("Experts", "train", "experts.html", training.experts)
    yield section("Predicted against actual", "evaluate", "regression.html", predictions.regression)
    yield section("Error by horizon", "evaluate", "forecast.html", predictions.forecast)
    yield section("NDCG by query", "evaluate", "ranking.html", predictions.ranking)
    curves = "classification_curves.html"
    yield Section("ROC and precision-recall", "evaluate", curves, partial(classification.curves, runs))
    yield section("Confusion matrix", "evaluate", "confusion.html", classification.confusion)
    yield section("Per class", "evaluate", "per_class.html", classification.per_class)
    no_probabilities = "Calibration is unknown: the task has no probabilities()." if facts.classes else ""
    yield section("Calibration", "evaluate", "calibration.html", classification.calibration, no_probabilities)
    yield section("Worst samples", "evaluate", "samples.html", predictions.worst_samples)
    yield section("Typical samples", "evaluate", "samples.html", predictions.typical_samples)
    yield section("ONNX parity", "export", "parity.html", export.parity, "The step has left no parity.json.")
    yield section("Variants", "export", "variants.html", export.variants)
    yield section("Formats", "export", "formats.html", export.formats)
    yield section("Package", "package", "package.html", export.package, "The step has left no image.json.")
    yield section("Service and latency", "deploy", "latency.html", export.latency, "The step has left no deploy.json.")
    yield section("Data", "prepare", "data.html", lineage.data, "The step has left no data.json.")
    histograms = partial(features.histograms, facts, champion_profile)
    yield Section("Inputs by split", "prepare", "features.html", histograms)
    yield section("Lineage", "", "lineage.html", lineage.lineage)
    yield section("Environment", "", "environment.html", lineage.environment)
    yield section("Reproduce", "", "reproduce.html", lineage.reproduce)
    yield section("Configuration", "", "configuration.html", lineage.configuration)


def _content(section: Section, facts: Facts) -> dict[str, str]:
    """Return the rendered section, or what is wrong, or why it is empty; nothing leaves the section out."""
    try:
        values = section.values()
        if values is not None:
            return {"content": render(section.template, **values)}
    except _SHAPE_ERRORS as error:  # files of another version, or edited by hand
        return {"problem": f"{type(error).__name__}: {error}"}
    if not section.absent:
        return {}
    record = facts.step(section.step)
    if record is not None and record.current_status in _FINISHED:
        return {"missing": section.absent}
    state = f"the {section.step} step {'is ' + record.current_status if record else 'has not run'}"
    return {"missing": f"Not reached: {state}."}


def _lead(facts: Facts) -> str:
    summary = str(facts.verdict.get("summary") or "the evaluate step has not finished in this run.")
    return ". ".join(text[:1].upper() + text[1:] for text in (summary, facts.pass_reason) if text)


def _tiles(facts: Facts) -> Iterator[Tile]:
    yield from _metric_tiles(facts)
    if facts.summary:
        work = f"{number(facts.summary.get('steps'))} steps, {number(facts.summary.get('epochs'))} epochs"
        yield "training", seconds(facts.summary.get("seconds")), work
        device = f"{facts.summary.get('world_size', '?')} × {str(facts.summary.get('device', '?')).upper()}"
        yield "throughput", number(facts.summary.get("samples_per_second")), f"samples/s on {device}"
    if runs := mappings(facts.parity.get("runs")):
        largest = max(run.get("max_abs_error") or 0.0 for run in runs)
        yield "ONNX parity", number(largest), "largest difference"
    if latency := facts.latency:
        yield "latency", milliseconds(latency.get("p50")), f"p95 {milliseconds(latency.get('p95'))}"


def _metric_tiles(facts: Facts) -> Iterator[Tile]:
    metric = str(facts.verdict.get("metric", ""))
    if not metric:
        return
    value, baseline = facts.candidate.get(metric), facts.baseline.get(metric)
    samples = f"{facts.metrics.get('samples')} samples"
    yield metric, score(value, metric), samples if baseline is None else f"baseline {score(baseline, metric)}"
    if difference := parse_range(facts.verdict.get("difference")):
        interval = f"{signed(difference.low)} to {signed(difference.high)}"
        yield "against baseline", signed(difference.estimate), interval


def _step(name: str, record: StepRecord | None) -> dict[str, str | None]:
    if record is None:
        return {"name": name, "kind": "none", "sign": "", "note": "not reached", "reason": None}
    kind, sign = evaluation.STATUS_SIGNS[record.current_status]
    note = f"reused from {record.reused_from}" if record.reused_from else seconds(record.seconds)
    if record.current_status != "done":
        note = f"{record.current_status} · {note}"
    return {"name": name, "kind": kind, "sign": sign, "note": note or MISSING, "reason": record.reason}


def write_index(history: History, path: Path) -> None:
    """Write one row per run. A run that has a report links to it, relative to where the index is written."""
    write_atomic(path, render_index([_row(run, path.parent) for run, _ in history]))


def render_index(rows: Sequence[dict[str, Any]]) -> str:
    script = read_asset("index.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    names = sorted({name for row in rows for name in row["settings"]})
    differing = [name for name in names if len({json.dumps(row["settings"].get(name)) for row in rows}) > 1]
    for row in rows:
        settings = {name: value for name, value in row["settings"].items() if name in differing}
        row["filter_values"] = json.dumps(row["settings"] | row["results"])
        row["settings"] = ", ".join(f"{name} {value}" for name, value in settings.items())
    results = sorted({name for row in rows for name in row["results"]})
    metric = next((row["metric"] for row in rows if row["metric"]), "accuracy")
    return render(
        "index.html",
        rows=rows,
        result_names=results,
        setting_names=differing,
        example=f"{metric}>0.9 {differing[0] if differing else 'train.lr'}=… passed",
        style=read_asset("style.css"),
        script=script,
        script_digest=digest,
    )


def _row(run: Run, folder: Path) -> dict[str, Any]:
    """Return a row of the index; a value that a damaged file lacks is None, so that rows can be sorted."""
    facts = read_facts(run)
    metric = str(facts.verdict.get("metric", ""))
    results = {name: value for name, value in facts.candidate.items() if is_number(value)}
    training = {name: value for name, value in facts.summary.items() if is_number(value)}
    difference = parse_range(facts.verdict.get("difference"))
    position, reached = _last_step(facts)
    report = run.path / "report.html"
    environment = facts.file.environment
    return {
        "id": run.id,
        "link": quote(Path(os.path.relpath(report, folder)).as_posix()) if report.is_file() else "",
        "facts": facts,
        "metric": metric,
        "value": results.get(metric),
        "score": score(results.get(metric), metric),
        "difference": difference.estimate if difference else None,
        "seconds": training.get("seconds"),
        "samples_per_second": training.get("samples_per_second"),
        "place": position,
        "reached": reached,
        "bundle": facts.digests.get("manifest.json", ""),
        "outcome": evaluation.describe_outcome(facts),
        "commit": environment.get(COMMIT, ""),
        "changed": environment.get(WORKING_TREE, "clean") != "clean",
        "settings": {
            name: json.dumps(value) if isinstance(value, list) else value
            for name, value in flat_settings(facts.file.config)
            if value not in (None, {}, [], "")
        },
        "results": results | {"name": facts.name, "verdict": facts.effective_verdict, "reached": reached},
    }


def _last_step(facts: Facts) -> tuple[float, str]:
    """Return the last step that ran: its position in the pipeline, and its name with its status."""
    records = [(i, record) for i, name in enumerate(STEPS) if (record := facts.step(name))]
    if not records:
        return -1.0, MISSING
    position, last_record = records[-1]
    return float(
        position
    ), last_record.step if last_record.current_status == "done" else f"{last_record.step} {last_record.current_status}"


_BETWEEN_TAGS = re.compile(r">\s*\n\s*<")


def render(template: str, **values: Any) -> Markup:
    """Render a file of `templates/`. Line breaks between two tags are layout of the template and are dropped.

    All templates know the macros of `macros.html` as `macros`, and those of `charts.html` as `draw`.
    """
    return Markup(_BETWEEN_TAGS.sub("><", _environment().get_template(template).render(values)))  # noqa: S704


def read_asset(name: str) -> Markup:
    """Return the style or the script of the pages, which are ours and not escaped."""
    return Markup(Path(__file__).with_name(name).read_text())  # noqa: S704


def score(value: float | None, metric: str) -> str:
    return percent(value) if "accuracy" in metric else number(value)


def date(created: str) -> str:
    return created.replace("T", " ").partition("+")[0][:16] + (" UTC" if created.endswith("+00:00") else "")


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).with_name("templates")),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=lambda value: "" if value is None else value,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for name in (number, percent, seconds, short, signed, size, date, score, px, interval_text, small_interval):
        environment.filters[name.__name__] = name
    environment.globals["macros"] = environment.get_template("macros.html").module
    environment.globals["draw"] = environment.get_template("charts.html").module
    return environment
