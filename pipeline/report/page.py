"""Puts the page together and writes it as one file.

All runs of a project on one page: sortable where scripts run, newest first everywhere.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from pipeline.contract.facts import Facts, is_number, read_facts
from pipeline.contract.files import write_atomic
from pipeline.contract.html import Child, Html, el, flat, number, seconds, short, signed
from pipeline.contract.run import STEPS, Run
from pipeline.history import History
from pipeline.report import comparison, evaluation, export, lineage, summary, training
from pipeline.report.charts import range_of
from pipeline.report.summary import date, score, stamp

STYLE = Path(__file__).with_name("style.css")
_ENDED = ("done", "rejected", "overridden")  # such a step has written all it had to say
_MISSHAPEN = (KeyError, TypeError, ValueError, AttributeError, IndexError, ZeroDivisionError)


@dataclass(frozen=True)
class Section:
    title: str
    step: str  # that writes what is drawn here; empty: the run itself
    draw: Callable[[], Child]
    absent: str = ""  # said where the step is done and has left nothing to draw; empty: then there is no section


def write_report(run: Run, path: Path, other: Run | None = None) -> None:
    """Whatever the run has reached so far, as one HTML file that opens offline; beside another run, if there is one."""
    facts = read_facts(run)
    if other is None:
        return write_atomic(path, render(facts))
    others = read_facts(other)
    return write_atomic(path, render(facts, others, comparison.paired(run, facts, other, others)))


def render(facts: Facts, other: Facts | None = None, found: comparison.Paired | None = None) -> str:
    sections = [shown for section in _sections(facts, other, found) if (shown := _content(section, facts)) is not None]
    contents = [el("li", el("a", section.title, href=f"#{_anchor(section)}")) for section, _ in sections]
    body = (
        summary.headline(facts),
        summary.road(facts),
        flat(summary.stopped(facts)),
        el("nav", el("ol", contents), aria_label="contents"),
        [el("section", el("h2", section.title), content, id=_anchor(section)) for section, content in sections],
    )
    return document(f"{facts.name} · {facts.file.id}", el("main", body))


def document(title: str, body: Child, script: str = "", script_digest: str = "") -> str:
    """One file, nothing from elsewhere: the page itself forbids it."""
    allowed = f"; script-src 'sha256-{script_digest}'" if script else ""
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'{allowed}"
    )
    head = el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", http_equiv="Content-Security-Policy", content=policy),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("meta", name="color-scheme", content="light dark"),
        el("title", title),
        el("style", Html(STYLE.read_text())),
    )
    running = el("script", Html(script)) if script else None
    return f"<!doctype html>\n{el('html', head, el('body', body, running), lang='en')}\n"


def _sections(facts: Facts, other: Facts | None, found: comparison.Paired | None) -> Iterator[Section]:
    if other is not None and found is not None:
        yield Section("Beside the other run", "", lambda: comparison.beside(facts, other, found))
    yield Section("Verdict", "evaluate", lambda: evaluation.verdict(facts), "The step has left no verdict.")
    no_slices = "No slices were judged: the task and its configuration name none."
    yield Section("Slices", "evaluate", lambda: evaluation.slices(facts), no_slices)
    yield Section("Learning curves", "train", lambda: training.curves(facts, other), "The journal has no lines.")
    yield Section("Speed and time", "train", lambda: training.speed(facts, other), "The journal has no lines.")
    yield Section("Experts", "train", lambda: training.mixture(facts))
    no_classes = "The task has no classes." if facts.metrics else "The step has left no metrics."
    yield Section("Confusion matrix", "evaluate", lambda: evaluation.confusion(facts), no_classes)
    yield Section("Per class", "evaluate", lambda: evaluation.per_class(facts))
    no_odds = "Nothing is known of calibration: the task gives no probabilities()."
    yield Section("Calibration", "evaluate", lambda: evaluation.calibration(facts), no_odds)
    no_worst = "No samples were kept: the run is of a version that did not."
    yield Section("Worst samples", "evaluate", lambda: evaluation.worst(facts), no_worst)
    yield Section("ONNX parity", "export", lambda: export.parity(facts), "The step has left no parity.json.")
    no_variants = "Only fp32 was asked for: export.variants names the others."
    yield Section("Variants", "export", lambda: export.variants(facts), no_variants)
    yield Section("Formats", "export", lambda: export.formats(facts))
    yield Section("Package", "package", lambda: export.package(facts), "The step has left no image.json.")
    yield Section("Service and latency", "deploy", lambda: export.latency(facts), "The step has left no deploy.json.")
    yield Section("Data", "prepare", lambda: lineage.data(facts), "The step has left no data.json.")
    yield Section("Lineage", "", lambda: lineage.lineage(facts))
    yield Section("Environment", "", lambda: lineage.environment(facts))
    yield Section("Reproduce", "", lambda: lineage.reproduce(facts))
    yield Section("Configuration", "", lambda: lineage.config(facts))


def _content(section: Section, facts: Facts) -> tuple[Section, Html] | None:
    """What is drawn, or why nothing is; None leaves the section out."""
    try:
        content = section.draw()
        drawn = None if content is None else flat(content)
    except _MISSHAPEN as error:  # files of another version, or edited: named here, and the rest of the page stands
        text = (
            f"What the run recorded for this is not of the shape this version reads ({type(error).__name__}: {error})."
        )
        return section, el("p", text, class_="note bad")
    if drawn is not None:
        return section, drawn
    record = facts.step(section.step)
    if record is not None and record.status in _ENDED:
        return (section, el("p", section.absent, class_="missing")) if section.absent else None
    if not section.absent:
        return None
    state = f"the {section.step} step {'is ' + record.status if record else 'has not run'}"
    return section, el("p", f"Not reached: {state}.", class_="missing")


def _anchor(section: Section) -> str:
    return re.sub(r"[^a-z]+", "-", section.title.lower())


_SCRIPT = Path(__file__).with_name("sort.js")
_HEAD = (
    "run",
    "name",
    "begun",
    "verdict",
    "metric",
    "value",
    "to baseline",
    "training",
    "samples/s",
    "reached",
    "bundle",
)
_NUMBERS = {"value", "to baseline", "training", "samples/s"}


@dataclass(frozen=True)
class Cell:
    shown: Child
    key: float | str | None = None  # what it is sorted by, where that is not what is shown


def write_index(history: History, path: Path) -> None:
    """One row for each run; a run with a report links to it, from wherever the page is written."""
    rows = [_row(run, path.parent) for run, _ in history]
    write_atomic(path, render_index(rows))


def render_index(rows: Sequence[Sequence[Cell]]) -> str:
    script = _SCRIPT.read_text()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    head = el("tr", [el("th", name, scope="col", class_=_kind(name)) for name in _HEAD])
    body = [el("tr", [_cell(name, cell) for name, cell in zip(_HEAD, row, strict=True)]) for row in rows]
    listing = el("div", el("table", el("thead", head), el("tbody", body)), class_="scroll")
    count = f"{number(len(rows))} runs, newest first. A heading sorts by its column."
    intro = (el("h1", "Runs"), el("p", count if rows else "No runs yet; `pipe run all` makes one.", class_="lead"))
    return document("Runs", el("main", intro, listing if rows else None, class_="index"), script, digest)


def _row(run: Run, folder: Path) -> list[Cell]:
    facts = read_facts(run)
    metric = str(facts.verdict.get("metric", ""))
    value = (facts.metrics.get("candidate") or {}).get(metric)
    found = range_of(facts.verdict.get("difference"))
    spent, speed = facts.summary.get("seconds"), facts.summary.get("samples_per_second")
    return [
        Cell(_link(run, folder), run.id),
        Cell(facts.name),
        Cell(date(facts.file.created), facts.file.created),
        Cell(stamp(facts.standing)),
        Cell(metric or "–"),
        Cell(score(metric, value), value),
        Cell(signed(found.estimate) if found else "–", found.estimate if found else None),
        Cell(seconds(spent), spent),
        Cell(number(speed), speed),
        Cell(*_reached(facts)),
        Cell(el("code", short(digest)) if (digest := facts.digests.get("manifest.json")) else "–"),
    ]


def _link(run: Run, folder: Path) -> Html:
    report = run.path / "report.html"
    if not report.is_file():
        return el("code", run.id)
    return el("a", el("code", run.id), href=quote(Path(os.path.relpath(report, folder)).as_posix()))


def _reached(facts: Facts) -> Iterator[str | float]:
    """The last step that did something, and how it ended."""
    known = [(i, record) for i, name in enumerate(STEPS) if (record := facts.step(name))]
    if not known:
        yield from ("–", -1.0)
        return
    place, last = known[-1]
    yield last.step if last.status == "done" else f"{last.step} {last.status}"
    yield float(place)


def _cell(name: str, cell: Cell) -> Html:
    key = cell.key if isinstance(cell.key, str) or is_number(cell.key) else None
    return el("td", cell.shown, class_=_kind(name), data_key=key)


def _kind(name: str) -> str | None:
    return "number" if name in _NUMBERS else None
