"""All runs of a project on one page: sortable where scripts run, newest first everywhere."""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from pipeline.history import History
from pipeline.report.intervals import range_of
from pipeline.report.overview import date, score, stamp
from pipeline.report.page import document
from pipeline.spec.facts import Facts, is_number, read_facts
from pipeline.spec.files import write_atomic
from pipeline.spec.html import Child, Html, el
from pipeline.spec.run import STEPS, Run
from pipeline.spec.wording import number, seconds, short, signed

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
    write_atomic(path, render(rows))


def render(rows: Sequence[Sequence[Cell]]) -> str:
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
