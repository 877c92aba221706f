from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from pipeline.report import write_report
from pipeline.report.charts import thin, ticks
from pipeline.spec.digest import digest_file
from pipeline.spec.files import write_atomic, write_json
from pipeline.spec.run import STEPS, Run, RunFile, StepRecord

CLASSES = tuple("0123456789")
CHECKPOINT = "c" * 64
ONNX = "e" * 64
HOSTILE = "<script>alert('x')</script>&\""


def make_run(runs: Path, reached: int = len(STEPS), **changes: Any) -> Run:
    """A digits run whose first `reached` steps are done."""
    run = Run(runs / "20260102-030405-abcd")
    run.path.mkdir(parents=True)
    writers = (write_prepare, write_train, write_evaluate, write_export, write_package, write_deploy)
    for name, write in list(zip(STEPS, writers, strict=True))[:reached]:
        run.output(name).mkdir()
        write(run)
    seconds = (1.1, 14.2, 2.6, 5.9, 0.4, 3.3)
    records = {
        name: StepRecord(step=name, status="done", key="k", parts={}, seconds=spent)
        for name, spent in list(zip(STEPS, seconds, strict=True))[:reached]
    }
    if "train" in records:
        records["train"] = records["train"].model_copy(update={"outputs": {"model.safetensors": CHECKPOINT}})
    values: dict[str, Any] = {
        "id": run.id,
        "created": "2026-01-02T03:04:05+00:00",
        "wanted": STEPS,
        "config": {"name": "digits", "task": "task.py:Digits", "evaluate": {"margin": 0.01}},
        "environment": {"python": "3.11.2", "torch": "2.13.0", "platform": "Linux x86_64"},
        "steps": records,
    }
    write_atomic(run.path / "run.json", RunFile(**(values | changes)).model_dump_json())
    return run


def write_prepare(run: Run) -> None:
    counts = {"train": 1077, "validation": 360, "test": 360}
    splits = {
        name: {"samples": n, "fingerprint": name[0] * 64, "classes": {c: n // 10 + int(c) % 3 for c in CLASSES}}
        for name, n in counts.items()
    }
    write_json(run.output("prepare") / "data.json", {"splits": splits, "duplicates": [], "duplicate_count": 0})


def write_train(run: Run) -> None:
    lines: list[dict[str, Any]] = []
    for step in range(1, 256):
        loss = 2.3 * math.exp(-step / 40) + 0.04 + 0.05 * math.sin(step * 1.7)
        lr = 0.003 * 0.5 * (1 + math.cos(math.pi * step / 255))
        speed = {"samples_per_second": 2400 + 200 * math.sin(step), "step_seconds": 0.026, "data_wait_share": 0.012}
        lines.append({"step": step, "epoch": step // 17, "loss": abs(loss), "lr": lr, "grad_norm": 1.1, **speed})
        if step % 17 == 0:
            validation = {"loss": 2.0 * math.exp(-step / 40) + 0.06, "accuracy": 1 - 0.8 * math.exp(-step / 30)}
            lines.append({"step": step, "epoch": step // 17, "validation": validation})
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (run.output("train") / "metrics.jsonl").write_text(text)
    summary = {"steps": 255, "epochs": 15, "best_step": 238, "best_validation": {"loss": 0.062, "accuracy": 0.9944}}
    machine = {"world_size": 2, "precision": "fp32", "device": "cpu", "seconds": 9.4, "samples_per_second": 2411.3}
    write_json(run.output("train") / "summary.json", {**summary, **machine, "stopped_early": False})


def write_evaluate(run: Run) -> None:
    matrix = [[36 if i == j else 0 for j in range(10)] for i in range(10)]
    for i, j in ((8, 1), (8, 1), (9, 3), (3, 5)):
        matrix[i][j] += 1
        matrix[i][i] -= 1
    rows = {
        c: {"samples": 36, "precision": 0.97, "recall": matrix[i][i] / 36, "f1": 0.98} for i, c in enumerate(CLASSES)
    }
    metrics = {
        "samples": 360,
        "test_fingerprint": "t" * 64,
        "candidate": {"accuracy": 0.98889, "log_likelihood": -0.0421},
        "baseline": {"accuracy": 0.96389, "log_likelihood": -0.1312},
        "classes": list(CLASSES),
        "per_class": rows,
        "confusion": matrix,
    }
    verdict = {
        "verdict": "pass",
        "forced_reason": "",
        "metric": "accuracy",
        "margin": 0.01,
        "confidence": 0.95,
        "samples": 360,
        "baseline": {"kind": "task", "bundle": None},
        "difference": {"estimate": 0.025, "low": 0.00833, "high": 0.04444},
        "mcnemar": {"p_value": 0.0117, "only_candidate": 11, "only_baseline": 2},
        "rules": [
            {"rule": "finite", "passed": True, "detail": "all finite: accuracy, log_likelihood"},
            {"rule": "require.accuracy", "passed": True, "detail": "accuracy 0.9889 reaches the required 0.95"},
            {"rule": "non-inferior", "passed": True, "detail": "accuracy difference is at least +0.0083"},
        ],
        "checkpoint": CHECKPOINT,
        "summary": "accuracy 0.9889 against the baseline's 0.9639, difference +0.0250 (95% +0.0083 to +0.0444)",
    }
    write_json(run.output("evaluate") / "metrics.json", metrics)
    write_json(run.output("evaluate") / "verdict.json", verdict)


def write_export(run: Run) -> None:
    runs = [
        {
            "batch_size": size,
            "max_abs_error": 4.8e-6,
            "max_rel_error": 2.1e-5,
            "beyond_tolerance": 0,
            "flips": 0,
            "unexplained_flips": 0,
            "seconds": 0.2 / size,
            "metrics": {"accuracy": 0.98889},
        }
        for size in (1, 2, 7, 256)
    ]
    body = {"rtol": 1e-3, "atol": 1e-4, "samples": 360, "opset": 20, "onnx_bytes": 605_321, "onnx_sha256": ONNX}
    write_json(run.output("export") / "parity.json", {**body, "runs": runs, "versions": {"onnx": "1.20"}})
    run.bundle_path.mkdir()
    ancestors = {
        "code": "a" * 64,
        "data": digest_file(run.output("prepare") / "data.json"),
        "checkpoint": CHECKPOINT,
        "verdict": digest_file(run.output("evaluate") / "verdict.json"),
        "onnx": ONNX,
    }
    write_json(run.bundle_path / "manifest.json", {"name": "digits", "verdict": "pass", "ancestors": ancestors})


def write_package(run: Run) -> None:
    body = {"image": "digits:1f2e3d", "builder": None, "image_digest": None, "context": "package/context"}
    write_json(run.output("package") / "image.json", {**body, "reason": "no container builder found"})


def write_deploy(run: Run) -> None:
    body = {
        "target": "local",
        "url": "http://127.0.0.1:8080",
        "bundle": digest_file(run.bundle_path / "manifest.json"),
        "golden": {"requests": 4},
        "latency_ms": {"p50": 1.84, "p95": 2.91, "max": 6.2, "requests": 50},
    }
    write_json(run.output("deploy") / "deploy.json", body)


def report(run: Run) -> str:
    path = run.path / "report.html"
    write_report(run, path)
    return path.read_text()


class Balance(HTMLParser):
    """Every tag that is opened is closed, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag not in ("meta", "br", "link"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.parametrize("reached", range(len(STEPS) + 1))
def test_a_run_that_stopped_anywhere_renders_as_balanced_html(tmp_path: Path, reached: int) -> None:
    page = report(make_run(tmp_path, reached))
    parser = Balance()
    parser.feed(page)
    assert not parser.open
    assert "digits" in page
    assert ("Not reached" in page) == (reached < len(STEPS))


def test_the_page_needs_nothing_from_outside(tmp_path: Path) -> None:
    page = report(make_run(tmp_path))
    parser = Balance()
    parser.feed(page)
    assert not parser.tags & {"script", "link", "img", "iframe", "object"}
    assert not re.search(r"""(src|href)=|url\(|@import""", page)


def test_the_numbers_that_decide_are_on_the_page(tmp_path: Path) -> None:
    page = report(make_run(tmp_path))
    for text in ("Passed", "98.9%", "+0.0250", "+0.0083", "4.8×10⁻⁶", "2,411", "1.84 ms", "360", "p = 0.0117"):
        assert text in page
    assert "pipe repro 20260102-030405-abcd" in page
    assert "8 taken for 1" in page


def test_hostile_names_are_shown_and_not_run(tmp_path: Path) -> None:
    run = make_run(tmp_path, config={"name": HOSTILE}, environment={HOSTILE: HOSTILE}, parent=HOSTILE)
    metrics = json.loads((run.output("evaluate") / "metrics.json").read_text())
    metrics["classes"] = [HOSTILE, *CLASSES[1:]]
    metrics["per_class"] = {HOSTILE: {"samples": 1, "precision": 0, "recall": 0, "f1": 0}}
    write_json(run.output("evaluate") / "metrics.json", metrics)
    page = report(run)
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    parser = Balance()
    parser.feed(page)
    assert "script" not in parser.tags


def test_a_rejected_run_says_so_and_why(tmp_path: Path) -> None:
    run = make_run(tmp_path, reached=3)
    file = run.read()
    reason = "candidate rejected: accuracy 0.9 is 0.05 below the required 0.95"
    rejected = file.steps["evaluate"].model_copy(update={"status": "rejected", "reason": reason})
    steps = {**file.steps, "evaluate": rejected}
    write_atomic(run.path / "run.json", file.model_copy(update={"steps": steps}).model_dump_json())
    body = json.loads((run.output("evaluate") / "verdict.json").read_text()) | {"verdict": "fail"}
    write_json(run.output("evaluate") / "verdict.json", body)
    run.output("evaluate").rename(run.partial("evaluate"))
    page = report(run)
    assert "Rejected" in page
    assert reason in page
    assert "98.9%" in page


def test_a_nan_metric_and_a_missing_interval_are_shown_as_such(tmp_path: Path) -> None:
    run = make_run(tmp_path, reached=3)
    for name, change in (
        ("metrics.json", {"candidate": {"accuracy": None}}),
        ("verdict.json", {"difference": None, "mcnemar": None, "verdict": "fail"}),
    ):
        path = run.output("evaluate") / name
        write_json(path, json.loads(path.read_text()) | change)
    assert "is not a finite number" in report(run)


def test_a_line_cut_short_by_a_killed_process_is_left_out(tmp_path: Path) -> None:
    run = make_run(tmp_path, reached=2)
    with (run.output("train") / "metrics.jsonl").open("a") as file:
        file.write('{"step": 256, "lo')
    assert "Loss" in report(run)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    (run.output("export") / "parity.json").write_text("{")
    page = report(run)
    assert "export/parity.json" in page
    assert "is damaged" in page


def test_a_broken_chain_is_named(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    assert "chain is broken" not in report(run)
    path = run.output("evaluate") / "verdict.json"
    write_json(path, json.loads(path.read_text()) | {"checkpoint": "f" * 64})
    assert "chain is broken at checkpoint, verdict" in report(run)


def test_many_classes_are_listed_by_their_confusions_instead_of_a_matrix(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    classes = [f"class {i}" for i in range(100)]
    matrix = [[5 if i == j else int(j == i + 1) for j in range(100)] for i in range(100)]
    path = run.output("evaluate") / "metrics.json"
    write_json(path, json.loads(path.read_text()) | {"classes": classes, "confusion": matrix})
    page = report(run)
    assert 'class="heat"' not in page
    assert "class 0 taken for class 1" in page


def test_long_training_is_thinned_and_keeps_its_last_value() -> None:
    points = [(float(i), float(i % 7)) for i in range(100_001)]
    thinned = thin(points)
    assert len(thinned) <= 302
    assert thinned[-1] == points[-1]


@pytest.mark.parametrize(("low", "high"), [(0, 1), (-0.013, 0.044), (1e-7, 9e-7), (0, 251_000), (0.99, 0.9901)])
def test_ticks_are_few_round_and_within_the_range(low: float, high: float) -> None:
    found = ticks(low, high)
    assert 2 <= len(found) <= 6
    assert low - 1e-9 <= found[0] < found[-1] <= high * (1 + 1e-9)
