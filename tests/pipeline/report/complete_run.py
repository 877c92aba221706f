"""Files that not every run has: slices, calibration, worst samples, variants, formats and checks of the data."""

from __future__ import annotations

from typing import Any

from pipeline.contract.run import Run
from pipeline.system.files import write_json

from .example_runs import CLASSES, change, write_deploy, write_manifest


def add_optional_files(run: Run) -> None:
    _add_to_evaluation(run)
    variants = [
        variant_body("fp32", 605_321, 0.21),
        variant_body("fp16", 303_010, 0.24),
        variant_body("int8-dynamic", 158_200, 0.12),
    ]
    variants[0]["difference"] = None
    variants[1] |= {"chosen": True, "reason": "the fastest that passes"}
    wrong = {"node": "/head/Gemm", "op": "MatMulInteger", "error": 3.25}
    variants[2] |= {"passed": False, "reason": "accuracy falls by 0.41.", "first_wrong": wrong}
    write_json(run.output("export") / "variants.json", variants)
    formats = [
        {"format": "pt2", "path": "formats/model.pt2", "passed": True, "reason": "", "max_abs_error": 1e-6},
        {
            "format": "savedmodel",
            "path": "",
            "passed": False,
            "reason": "onnx2tf is not installed",
            "max_abs_error": None,
        },
    ]
    write_json(run.output("export") / "formats.json", formats)
    drift = {
        "check": "drift",
        "where": "image[3]",
        "level": "warn",
        "value": 0.31,
        "limit": 0.2,
        "detail": "PSI is high",
    }
    fine = {
        "check": "missing",
        "where": "train",
        "level": "ok",
        "value": 0.0,
        "limit": 0.0,
        "detail": "nothing is missing",
    }
    write_json(run.output("prepare") / "checks.json", {"checks": [fine, drift], "notes": []})
    timed = [{"batch_size": size, "samples_per_second": 12.5 * size} for size in (8, 16)]
    write_json(run.output("train") / "batch_size.json", {"batch_size": 16, "limit": "memory", "timed": timed})
    elsewhere = {"place": "CPU, 1 thread", "inputs": "zeros", "max_abs_error": 1e-6, "beyond_tolerance": 3}
    padding = {"samples": 9, "differing": 2, "max_abs_error": 0.1, "worst": "scores", "unknown": {"n": "no mask"}}
    parity = {"coverage": [elsewhere], "left_out": ["CUDA"], "padding": padding, "weights": {"text": "4 of 4 tensors"}}
    change(run.output("export") / "parity.json", **parity)
    if (run.bundle_path / "manifest.json").exists():
        change(run.output("export") / "parity.json", onnx_sha256="f" * 64, onnx_bytes=303_010)  # of fp16
        write_manifest(run, onnx="f" * 64)
    if run.output("deploy").exists():
        write_deploy(run)


def _add_to_evaluation(run: Run) -> None:
    bins = [
        {"low": i / 10, "high": (i + 1) / 10, "count": 4 * i * i + 2, "confidence": i / 10 + 0.05, "accuracy": i / 9.2}
        for i in range(10)
    ]
    calibration = {
        "candidate": {"ece": 0.0213, "brier": 0.0187, "bins": bins},
        "baseline": {"ece": 0.0534, "brier": 0.0612, "bins": bins[4:]},
    }
    slices = [
        slice_body(f"ink={name}", 120, low) for name, low in (("thin", 0.004), ("thick", -0.08), ("plain", -0.01))
    ]
    slices[1] |= {"passed": False, "detail": "ink=thick may be 0.0800 worse than the baseline's"}
    slices.append(
        {"slice": "ink=none", "samples": 3, "candidate": 1.0, "baseline": 1.0, "judged": False, "passed": True}
    )
    change(run.output("evaluate") / "verdict.json", slices=slices, calibration=calibration, detectable=0.017)
    samples = [
        {
            "index": 17 * i,
            "value": 0.0,
            "baseline": 1.0,
            "metrics": {"accuracy": 0.0, "log_likelihood": -3.2 + i / 10},
            "actual": "8",
            "predicted": "1",
            "baseline_predicted": "8",
            "shown": [shown],
        }
        for i, shown in enumerate(SHOWN)
    ]
    write_json(run.output("evaluate") / "worst.json", {"metric": "accuracy", "note": "", "samples": samples})
    curves = [curve_body(name, area) for name, area in (("8", 0.99), ("1", 0.97))]
    write_json(run.output("evaluate") / "figures.json", {"classification": {"classes": CLASSES, "curves": curves}})


PNG = (
    "iVBORw0KGgoAAAANSUhEUgAAAAgAAAAICAAAAADhZOFXAAAAU0lEQVR4nAFIALf/AEQggjz95vHCAGsw+Q7H3QHkAIh1NKIPCw0E"
    "AMNu2A5x4P13ALB2cOuUC9UzAF+XParYYZuRAP/JEfV8ztRYALu/LOA3U8m9lyciAlDVZRwAAAAASUVORK5CYII="
)
SHOWN = (
    {"name": "image", "kind": "picture", "shape": [1, 8, 8], "png": PNG},
    {"name": "text", "kind": "text", "text": "def first(row):\n    return row[0]", "whole": False},
    {"name": "features", "kind": "values", "shape": [13], "values": [0.25, None, -1.5], "count": 13},
)


def curve_body(name: str, area: float) -> dict[str, Any]:
    return {
        "model": "candidate",
        "class": name,
        "positives": 36,
        "auc": area,
        "average_precision": area - 0.1,
        "roc": [[0, 0], [0.1, 0.8], [1, 1]],
        "pr": [[0, 1], [0.8, 0.7], [1, 0.4]],
        "decision": {"tpr": 0.8, "fpr": 0.1, "precision": None},
    }


def variant_body(name: str, size: int, milliseconds: float) -> dict[str, Any]:
    return {
        "variant": name,
        "chosen": False,
        "passed": True,
        "reason": "",
        "bytes": size,
        "p50_ms": {"1": milliseconds, "32": milliseconds * 9},
        "metric": {"name": "accuracy", "value": 0.98889, "reference": 0.98889},
        "difference": {"estimate": -0.0028, "low": -0.0083, "high": 0.0},
        "max_abs_error": 0.0123,
        "first_wrong": None,
    }


def slice_body(name: str, samples: int, low: float) -> dict[str, Any]:
    return {
        "slice": name,
        "samples": samples,
        "candidate": 0.98,
        "baseline": 0.96,
        "difference": {"estimate": low + 0.02, "low": low, "high": low + 0.05},
        "adjusted_p": 0.034,
        "judged": True,
        "passed": True,
        "detail": "",
    }
