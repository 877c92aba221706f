"""The memory of a service, against which the pods of a Deployment are sized."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from k8s.objects.serving import default_memory
from pipeline.contract.bundle import open_bundle
from pipeline.contract.golden import Golden
from pipeline.contract.signature import Limits, Runtime, Signature, TensorSpec
from pipeline.system.files import write_json
from tests.serve.bundles import seal
from tests.serve.llm import tiny

WIDTH, LAYERS = 1024, 48  # 192 MiB
LOAD = """
import sys
from pathlib import Path
import numpy as np
import serve.__main__
from pipeline.contract.bundle import open_bundle
from serve.runtime.loading import load_predictor
language_model = load_predictor(open_bundle(Path(sys.argv[1])), None, None).language_model
if language_model is not None:
    graph, past = language_model.graph, np.zeros((1, 2, 60_000, 8), np.float32)
    cache = graph.filled_cache(np.zeros(1, np.int64), [past] * len(graph.layers))
    graph.run(cache, np.zeros((1, graph.affordable_width(1, cache.past, 512)), np.int64))
print(Path("/proc/self/status").read_text())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("external", [False, True])
@pytest.mark.long
def test_a_pod_has_the_memory_that_loading_takes(external: bool, tmp_path: Path) -> None:
    names = ["x", *(f"h{layer}" for layer in range(LAYERS - 1)), "y"]
    nodes = [helper.make_node("MatMul", [names[i], f"w{i}"], [names[i + 1]]) for i in range(LAYERS)]
    weight = np.eye(WIDTH, dtype=np.float32)
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", WIDTH]) for name in "xy"]
    weights = [numpy_helper.from_array(weight, f"w{layer}") for layer in range(LAYERS)]
    graph = helper.make_graph(nodes, "large", values[:1], values[1:], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.save(model, tmp_path / "model.onnx", save_as_external_data=external, location="model.onnx.data")
    specs = [TensorSpec(name=name, datatype="FP32", shape=("batch", WIDTH)) for name in "xy"]
    limits = Limits(max_batch_size=64, max_body_bytes=1 << 20)
    signature = Signature(
        inputs=(specs[0],), outputs=(specs[1],), codec="", limits=limits, runtime=Runtime(provider="cpu", threads=1)
    )
    write_json(tmp_path / "signature.json", signature.model_dump())
    rows = np.random.default_rng(0).normal(size=(2, WIDTH)).astype(np.float32)
    Golden({"x": rows}, {"y": rows}, [], [], rtol=1e-3, atol=1e-4).write(tmp_path)
    (tmp_path / "card.md").write_text("# large\n")
    seal(tmp_path)
    assert 0 < peak_memory(tmp_path) < rendered_memory(tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_pod_has_the_memory_that_a_long_prompt_takes(tmp_path: Path) -> None:
    bundle = tiny.build(tmp_path / "bundle", positions=65_536, max_cache_bytes=16 << 20)
    assert 0 < peak_memory(bundle) < rendered_memory(bundle)


def rendered_memory(bundle: Path) -> int:
    return int(default_memory(open_bundle(bundle)).removesuffix("Mi")) << 20


def peak_memory(bundle: Path) -> int:
    status = subprocess.run([sys.executable, "-c", LOAD, str(bundle)], capture_output=True, text=True, check=True)
    peak = re.search(r"VmHWM:\s+(\d+) kB", status.stdout)
    assert peak is not None
    return int(peak[1]) << 10
