"""The export step: `python -m export RUN`. A judged checkpoint becomes a verified bundle."""

from __future__ import annotations

import logging
import shutil
import sys
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import torch

from export.bundle import fill
from export.card import card
from export.convert import check_external_data, convert, tensor_specs
from export.parity import require_equal, verify
from pipeline.spec.bundle import Ancestors, open_bundle, write_manifest
from pipeline.spec.data import check_columns, open_split
from pipeline.spec.digest import digest_file
from pipeline.spec.errors import GateError, StageError
from pipeline.spec.files import write_json
from pipeline.spec.run import Run
from pipeline.spec.sources import code_digest
from pipeline.spec.step import run_step
from pipeline.spec.task import load_task
from pipeline.spec.weights import load_weights

ALLOWED = ("pass", "no-baseline", "forced")


def export(run: Run, root: Path) -> None:
    config, weights = run.config, run.output("train") / "model.safetensors"
    verdict = _allowed_verdict(run, digest_file(weights))
    bundle = run.partial("export") / "bundle"
    shutil.rmtree(bundle, ignore_errors=True)
    bundle.mkdir(parents=True)
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it tells of every optional package that is missing
    task = load_task(config.task, root)
    test = open_split(task, "test")
    check_columns(task, test)
    model = load_weights(task.model(), weights)
    convert(model, task, test.batch([i % len(test) for i in range(3)]), config.export, bundle / "model.onnx")
    onnx.checker.check_model(bundle / "model.onnx", full_check=True)
    check_external_data(bundle / "model.onnx")
    tensor_specs(bundle / "model.onnx")  # a fixed batch axis is told here, before other batch sizes fail on it
    comparisons = verify(task, model, test, bundle / "model.onnx", config.export)
    write_json(run.partial("export") / "parity.json", _parity(run, comparisons, len(test), bundle / "model.onnx"))
    require_equal(comparisons, config.export)
    signature = fill(bundle, task, test, config, root)
    ancestors = _ancestors(run, root, weights, bundle)
    (bundle / "card.md").write_text(card(config.name, signature, verdict, ancestors))
    digest = write_manifest(bundle, config.name, str(verdict["verdict"]), ancestors)
    open_bundle(bundle)  # what a server will do
    worst = max(found["max_abs_error"] for found in comparisons)
    print(f"equal to torch on {len(test)} test samples at batch sizes {list(config.export.batch_sizes)}")
    print(f"largest difference {worst:.2g}; bundle {digest[:12]}")


def _allowed_verdict(run: Run, checkpoint: str) -> dict[str, Any]:
    """The verdict lets this very checkpoint pass."""
    verdict = run.verdict()
    if verdict["verdict"] not in ALLOWED:
        raise GateError(f"the verdict is `{verdict['verdict']}`: {verdict['summary']}")
    if verdict["checkpoint"] != checkpoint:
        raise StageError("the verdict is about another checkpoint than train/model.safetensors; evaluate again")
    return verdict


def _ancestors(run: Run, root: Path, weights: Path, bundle: Path) -> Ancestors:
    return Ancestors(
        code=code_digest(root, run.config.task, run.config.codec),
        data=digest_file(run.output("prepare") / "data.json"),
        checkpoint=digest_file(weights),
        verdict=digest_file(run.output("evaluate") / "verdict.json"),
        onnx=digest_file(bundle / "model.onnx"),
    )


def _parity(run: Run, comparisons: list[dict[str, Any]], samples: int, model: Path) -> dict[str, Any]:
    config = run.config.export
    return {
        "rtol": config.rtol,
        "atol": config.atol,
        "samples": samples,
        "opset": config.opset,
        "onnx_bytes": model.stat().st_size,
        "onnx_sha256": digest_file(model),
        "runs": comparisons,
        "versions": {"torch": torch.__version__, "onnx": onnx.__version__, "onnxruntime": onnxruntime.__version__},
    }


if __name__ == "__main__":
    sys.exit(run_step("export", export, sys.argv[1:]))
