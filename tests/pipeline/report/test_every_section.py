"""All sections: valid pages, escaped texts, and damaged files that affect no other section."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.contract.run import Run
from pipeline.history import load_history
from pipeline.report.page import write_index
from pipeline.system.files import write_atomic, write_json

from .example_runs import HOSTILE
from .pages import charts, check_page, report, sections
from .task_kinds import KINDS

COMPLETE = "classifier"  # the run with files for nearly all sections
MAX_BYTES = 1 << 20
# The files of a run, and the sections that show something of them.
FILES = {
    "prepare/data.json": {"Data", "Lineage"},
    "prepare/checks.json": {"Data", "Inputs by split"},
    "train/summary.json": {"Learning curves", "Speed and time"},
    "train/batch_size.json": {"Speed and time"},
    "evaluate/metrics.json": {"Verdict", "Confusion matrix", "Per class", "Worst samples"},
    "evaluate/verdict.json": {"Verdict", "Slices", "Calibration", "Lineage"},
    "evaluate/worst.json": {"Worst samples"},
    "evaluate/figures.json": {"ROC and precision-recall"},
    "export/parity.json": {"ONNX parity", "Lineage"},
    "export/variants.json": {"ONNX parity", "Variants"},
    "export/formats.json": {"Formats"},
    "export/bundle/manifest.json": {"Lineage"},
    "package/image.json": {"Package", "Lineage"},
    "deploy/deploy.json": {"Service and latency", "Lineage"},
}
NUMBER = re.compile(r"(?<=: )-?[0-9][0-9.e-]*")  # a value in a file
ENUMERATIONS = {"kind", "png", "model", "level", "verdict"}  # keys whose values decide what is drawn
NAMES = {"per_class", "metrics"}  # keys of mappings from names that users chose
# Sections that show only numbers where the run has no texts for them.
WITHOUT_TEXTS = {"Verdict", "Speed and time", "Predicted against actual", "NDCG by query", "ONNX parity"}
WITHOUT_TEXTS |= {"Package", "Service and latency", "Error by horizon"}


def copied(run: Run, folder: Path) -> Run:
    return Run(Path(shutil.copytree(run.path, folder / "runs" / run.id)))


@pytest.mark.parametrize("name", [COMPLETE, *KINDS])
def test_page_is_valid_and_small(pages: dict[str, str], name: str) -> None:
    check_page(pages[name])
    assert len(pages[name]) < MAX_BYTES
    assert sum('class="grid"' in chart for chart in charts(pages[name])) >= 5


@pytest.mark.parametrize("name", [COMPLETE, *KINDS])
def test_texts_of_all_files_are_escaped(examples: dict[str, Run], name: str, tmp_path: Path) -> None:
    run = copied(examples[name], tmp_path)
    for path in run.path.rglob("*.json"):
        if path.name != "run.json":
            write_json(path, _with_hostile_texts(json.loads(path.read_text())))
    file = run.read()
    steps = {step: record.model_copy(update={"parts": {HOSTILE: HOSTILE}}) for step, record in file.steps.items()}
    hostile = {"config": {"name": HOSTILE}, "environment": {HOSTILE: HOSTILE}, "parent": HOSTILE, "steps": steps}
    write_atomic(run.path / "run.json", file.model_copy(update=hostile).model_dump_json())
    shown = sections(report(run, examples[COMPLETE], shapes=False))
    plain = {title for title, text in shown.items() if "&lt;script&gt;" not in text}
    assert plain <= {"Calibration", *(() if name == COMPLETE else WITHOUT_TEXTS)}
    index = tmp_path / "index.html"
    write_index(load_history(run.runs), index)
    assert index.read_text().count("<script") == 1, "only its own, which the policy allows by digest"


def _with_hostile_texts(body: Any, key: str = "") -> Any:
    if isinstance(body, dict):
        prefix = HOSTILE if key in NAMES else ""
        return {f"{prefix}{name}": _with_hostile_texts(value, name) for name, value in body.items()}
    if isinstance(body, list):
        return [_with_hostile_texts(value, key) for value in body]
    return f"{HOSTILE}{body}" if isinstance(body, str) and key not in ENUMERATIONS else body


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda text: "{", id="cut"),
        pytest.param(lambda text: json.dumps(_with_other_shape(json.loads(text))), id="other shape"),
        pytest.param(lambda text: NUMBER.sub("null", text), id="no numbers"),
        pytest.param(lambda text: NUMBER.sub('"x"', text), id="texts"),
    ],
)
@pytest.mark.parametrize("name", FILES)
def test_damaged_file_affects_only_the_sections_that_show_it(
    examples: dict[str, Run], pages: dict[str, str], tmp_path: Path, name: str, damage: Callable[[str], str]
) -> None:
    run = copied(examples[COMPLETE], tmp_path)
    before = sections(pages[COMPLETE])
    path = run.path / name
    path.write_text(damage(path.read_text()))
    page = report(run, shapes=False)
    after = sections(page)
    assert {title for title in before | after if before.get(title) != after.get(title)} <= FILES[name]
    assert (f"<b>{name} </b>is damaged and left out" in page) == (path.read_text() == "{")
    write_index(load_history(run.runs), tmp_path / "index.html")
    assert run.id in (tmp_path / "index.html").read_text()


def _with_other_shape(body: Any) -> Any:
    return dict.fromkeys(body, 7) if isinstance(body, dict) else [7]
