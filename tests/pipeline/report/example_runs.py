"""Run directories that have just the files the report reads."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.contract.run import STEPS, Run, RunFile, StepRecord
from pipeline.system.files import digest_file, write_atomic, write_json

CLASSES = tuple("0123456789")
CHECKPOINT = "c" * 64
ONNX = "e" * 64
HOSTILE = "<script>alert('x')</script>&\""


def make_run(runs: Path, reached: int = len(STEPS), **changes: Any) -> Run:
    """A digits run whose first `reached` steps are done."""
    run = Run(runs / "20260102-030405-abcd")
    run.path.mkdir(parents=True)
    writers = (write_check, write_prepare, write_train, write_evaluate, write_export, write_package, write_deploy)
    for name, write in list(zip(STEPS, writers, strict=True))[:reached]:
        run.output(name).mkdir()
        write(run)
    seconds = (0.9, 1.1, 14.2, 2.6, 5.9, 0.4, 3.3)
    records = {
        name: StepRecord(step=name, status="done", key="k", parts={}, seconds=duration)
        for name, duration in list(zip(STEPS, seconds, strict=True))[:reached]
    }
    if "train" in records:
        records["train"] = records["train"].model_copy(update={"outputs": {"model.safetensors": CHECKPOINT}})
    values: dict[str, Any] = {
        "id": run.id,
        "created": "2026-01-02T03:04:05+00:00",
        "wanted": STEPS,
        "config": {"name": "digits", "task": "task.py:Digits", "codec": "codec.py:C", "evaluate": {"margin": 0.01}},
        "environment": {"python": "3.11.2", "torch": "2.13.0", "platform": "Linux x86_64"},
        "steps": records,
    }
    write_atomic(run.path / "run.json", RunFile(**(values | changes)).model_dump_json())
    return run


def write_check(run: Run) -> None:
    write_json(run.output("check") / "check.json", {"seconds": {"data()": 0.01}})


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
    write_manifest(run)


def write_manifest(run: Run, onnx: str = ONNX) -> None:
    ancestors = {
        "code": "a" * 64,
        "data": digest_file(run.output("prepare") / "data.json"),
        "checkpoint": CHECKPOINT,
        "verdict": digest_file(run.output("evaluate") / "verdict.json"),
        "onnx": onnx,
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


def make_other_run(runs: Path, lr: float = 0.001, name: str = "20260101-010101-ef01") -> Run:
    """A second run on the same test set, with another learning rate and worse results."""
    run = make_run(runs / "other", reached=4)
    path = run.path.rename(runs / name)
    other = Run(path)
    file = other.read()
    steps = {name: step.model_copy(update={"parts": {"config:train.lr": str(lr)}}) for name, step in file.steps.items()}
    body = file.model_copy(update={"id": other.id, "steps": steps})
    write_atomic(other.path / "run.json", body.model_dump_json())
    return other


def write_predictions(run: Run, right: int, samples: int = 360) -> None:
    values = np.zeros(samples)
    values[:right] = 1
    columns = {
        "candidate.accuracy": values,
        "actual": np.arange(samples) % 10,
        "candidate.predicted": np.zeros(samples),
    }
    np.savez(run.output("evaluate") / "predictions.npz", allow_pickle=False, **columns)


def change(path: Path, **values: Any) -> None:
    write_json(path, (json.loads(path.read_text()) if path.exists() else {}) | values)
