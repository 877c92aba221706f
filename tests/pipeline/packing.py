"""Runs with a small bundle to package, and fake container tools."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from pipeline.contract.bundle import Ancestors, write_manifest
from pipeline.contract.golden import Golden
from pipeline.contract.run import Run, StepRecord
from pipeline.contract.signature import Limits, Runtime, Signature, TensorSpec
from pipeline.history import write_record
from pipeline.steps import package
from pipeline.system.files import digest_file, digest_mapping, digest_tree, write_json

MakeRun = Callable[..., Run]
PutBuilders = Callable[..., Path]
BASE = "127.0.0.1:1/python:3.11-slim"  # no registry answers there
DIGEST = "5" * 64
PUSHED = "7" * 64

# A builder that answers `info`, records its arguments, and writes digests where real builders do.
WORKING = f"""#!/bin/sh
here="$(dirname "$0")"
echo "$(basename "$0") $*" >> "$here/called"
case "$1" in
info) exit 0 ;;
build | buildx)
    if [ "$1 $3" = "buildx --help" ]; then cat "$here/buildx"; exit; fi
    echo "building from $PIP_INDEX_URL"
    while [ $# -gt 0 ]; do [ "$1" = --iidfile ] && printf %s sha256:{DIGEST} > "$2"; shift; done ;;
image) echo '["r.example/other@sha256:{DIGEST}","r.example/twice@sha256:{PUSHED}"]' ;;
push)
    while [ $# -gt 0 ]; do
        [ "$1" = --digestfile ] && printf %s sha256:{PUSHED} > "$2"
        shift
    done ;;
esac
"""
FAILING = """#!/bin/sh
[ "$1" = info ] && exit 0
echo "Step 4: RUN pip"
echo "no space left on device"
exit 3
"""
NO_DAEMON = """#!/bin/sh
echo "Cannot connect to the daemon" >&2
exit 1
"""
NOT_ALLOWED = WORKING.replace("push)", 'push) case "$*" in *docker://*) echo "denied: log in first"; exit 1 ;; esac')


CODEC = """
import numpy as np


class C:
    def decode(self, instances):
        return {"x": np.asarray(instances, np.float32)}

    def encode(self, outputs):
        return outputs["y"].tolist()
"""


def write_bundle(directory: Path, verdict: str = "pass", ancestors: Ancestors | None = None) -> None:
    """Write the bundle of a model that doubles its input by a matrix."""
    directory.mkdir(parents=True)
    weight = numpy_helper.from_array(np.float32(2) * np.eye(2, dtype=np.float32), "w")
    row = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 2]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "twice", row[:1], row[1:], [weight])
    opset = [helper.make_opsetid("", 20)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=10), directory / "model.onnx")
    spec = {name: TensorSpec(name=name, datatype="FP32", shape=("batch", 2)) for name in ("x", "y")}
    limits, runtime = Limits(max_batch_size=8, max_body_bytes=1024), Runtime(provider="cpu", threads=1)
    signature = Signature(inputs=(spec["x"],), outputs=(spec["y"],), codec="C", limits=limits, runtime=runtime)
    write_json(directory / "signature.json", signature.model_dump())
    x = np.ones((1, 2), np.float32)
    Golden({"x": x}, {"y": 2 * x}, [[1, 1]], [[2, 2]], rtol=1e-3, atol=1e-4).write(directory)
    (directory / "codec.py").write_text(CODEC)
    (directory / "card.md").write_text("# twice\n")
    lineage = ancestors or Ancestors(code="a", data="b", checkpoint="c", verdict="d", onnx="")
    onnx_digest = digest_file(directory / "model.onnx")
    write_manifest(directory, "twice", verdict, lineage.model_copy(update={"onnx": onnx_digest}))


def record_export(run: Run) -> None:
    """Record the bundle as the export does, and write run.json with its seal."""
    outputs = digest_tree(run.output("export"))
    record = StepRecord(
        step="export", status="done", key="k", parts={}, outputs=outputs, digest=digest_mapping(outputs)
    )
    write_record(run, record)


def pack(run: Run) -> dict[str, Any]:
    package.package(run, run.path)
    record: dict[str, Any] = json.loads((run.partial("package") / "image.json").read_text())
    return record


def context_of(run: Run) -> Path:
    return run.partial("package") / "context"
