"""Puts the page together and writes it as one file."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from pipeline.report import (
    calibration,
    classes,
    comparison,
    judgement,
    lineage,
    mixture,
    origins,
    overview,
    service,
    slices,
    speed,
    training,
    variants,
    worst,
)
from pipeline.spec.facts import Facts, read_facts
from pipeline.spec.files import write_atomic
from pipeline.spec.html import Child, Html, el, flat
from pipeline.spec.run import Run

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
        overview.headline(facts),
        overview.road(facts),
        flat(overview.stopped(facts)),
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
    yield Section("Verdict", "evaluate", lambda: judgement.verdict(facts), "The step has left no verdict.")
    no_slices = "No slices were judged: the task and its configuration name none."
    yield Section("Slices", "evaluate", lambda: slices.slices(facts), no_slices)
    yield Section("Learning curves", "train", lambda: training.curves(facts, other), "The journal has no lines.")
    yield Section("Speed and time", "train", lambda: speed.speed(facts, other), "The journal has no lines.")
    yield Section("Experts", "train", lambda: mixture.mixture(facts))
    no_classes = "The task has no classes." if facts.metrics else "The step has left no metrics."
    yield Section("Confusion matrix", "evaluate", lambda: classes.confusion(facts), no_classes)
    yield Section("Per class", "evaluate", lambda: classes.per_class(facts))
    no_odds = "Nothing is known of calibration: the task gives no probabilities()."
    yield Section("Calibration", "evaluate", lambda: calibration.calibration(facts), no_odds)
    no_worst = "No samples were kept: the run is of a version that did not."
    yield Section("Worst samples", "evaluate", lambda: worst.worst(facts), no_worst)
    yield Section("ONNX parity", "export", lambda: variants.parity(facts), "The step has left no parity.json.")
    no_variants = "Only fp32 was asked for: export.variants names the others."
    yield Section("Variants", "export", lambda: variants.variants(facts), no_variants)
    yield Section("Formats", "export", lambda: variants.formats(facts))
    yield Section("Package", "package", lambda: service.package(facts), "The step has left no image.json.")
    yield Section("Service and latency", "deploy", lambda: service.latency(facts), "The step has left no deploy.json.")
    yield Section("Data", "prepare", lambda: origins.data(facts), "The step has left no data.json.")
    yield Section("Lineage", "", lambda: lineage.lineage(facts))
    yield Section("Environment", "", lambda: origins.environment(facts))
    yield Section("Reproduce", "", lambda: origins.reproduce(facts))
    yield Section("Configuration", "", lambda: origins.config(facts))


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
