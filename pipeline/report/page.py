"""Puts the page together and writes it as one file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pipeline.report import judgement, origins, overview, service, speed, training
from pipeline.report.facts import Facts, read_facts
from pipeline.spec.files import write_atomic
from pipeline.spec.html import Child, Html, el, flat
from pipeline.spec.run import Run

_STYLE = Path(__file__).with_name("style.css")


def write_report(run: Run, path: Path) -> None:
    """Whatever the run has reached so far, as one HTML file that opens offline."""
    write_atomic(path, render(read_facts(run)))


def render(facts: Facts) -> str:
    head = el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("meta", name="color-scheme", content="light dark"),
        el("title", f"{facts.name} · {facts.file.id}"),
        el("style", Html(_STYLE.read_text())),
    )
    body = el("body", el("main", _content(facts)), _foot(facts))
    return f"<!doctype html>\n{el('html', head, body, lang='en')}\n"


def _content(facts: Facts) -> Iterator[Html]:
    yield overview.headline(facts)
    yield overview.road(facts)
    yield flat(overview.stopped(facts))
    yield _section("Verdict", "evaluate", facts, judgement.verdict(facts))
    yield _section("Learning curves", "train", facts, training.curves(facts))
    if facts.steps:
        yield _section("Speed and communication", "train", facts, speed.speed(facts))
    classified = bool(facts.metrics.get("classes")) or not facts.metrics
    if classified:
        yield _section("Confusion matrix", "evaluate", facts, judgement.confusion(facts))
        yield _section("Per class", "evaluate", facts, judgement.per_class(facts))
    yield _section("ONNX parity", "export", facts, service.parity(facts))
    yield _section("Package", "package", facts, service.package(facts))
    yield _section("Service and latency", "deploy", facts, service.latency(facts))
    yield _section("Data", "prepare", facts, origins.data(facts))
    yield _section("Lineage", "", facts, origins.lineage(facts))
    yield _section("Environment", "", facts, origins.environment(facts))
    yield _section("Configuration", "", facts, origins.config(facts))


def _section(title: str, step: str, facts: Facts, content: Child) -> Html:
    if content is None:
        record = facts.step(step)
        state = f"the {step} step {'is ' + record.status if record else 'has not run'}"
        content = el("p", f"Not reached: {state}.", class_="missing")
    return el("section", el("h2", title), content)


def _foot(facts: Facts) -> Html:
    again = el("p", "Reproduce this run", el("code", f"pipe repro {facts.file.id}", class_="command"))
    parent = el("p", "Rerun of ", el("code", facts.file.parent), class_="muted") if facts.file.parent else None
    return el("footer", again, parent)
