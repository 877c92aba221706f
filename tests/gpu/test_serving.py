from __future__ import annotations

import ctypes
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from pipeline.contract.bundle import Bundle, open_bundle
from pipeline.system.processes import cuda_problem
from serve.runtime import session
from serve.runtime.loading import capture_graphs
from serve.runtime.predictor import Predictor
from serve.runtime.session import Node, Session, enable_profiling, misplaced_nodes, profile_folder, profile_run
from serve.runtime.tensorrt import TENSORRT, tensorrt_problem
from tests.serve.bundles import build, digits

AVAILABLE = onnxruntime.get_available_providers()
NO_CUDA = cuda_problem(AVAILABLE)
NO_TENSORRT = NO_CUDA or tensorrt_problem(AVAILABLE)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(NO_CUDA), reason=NO_CUDA or "-")]

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"


def _model(path: Path, last: str) -> Path:
    """Write a model that flattens its input by its shape, multiplies it, and applies the operator `last`."""
    weight = np.random.default_rng(0).normal(size=(64, 10)).astype(np.float32)
    constants = {"zero": np.array([0]), "rest": np.array([-1])}
    graph = helper.make_graph(
        [
            helper.make_node("Shape", ["x"], ["shape"]),
            helper.make_node("Gather", ["shape", "zero"], ["batch"]),
            helper.make_node("Concat", ["batch", "rest"], ["flat_shape"], axis=0),
            helper.make_node("Reshape", ["x", "flat_shape"], ["flat"]),
            helper.make_node("MatMul", ["flat", "weight"], ["product"]),
            helper.make_node(last, ["product"], ["y"], name="last"),
        ],
        "small",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 1, 8, 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 10])],
        [numpy_helper.from_array(value, name) for name, value in {**constants, "weight": weight}.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
    return path


def _misplaced_nodes(path: Path) -> list[Node]:
    options, image = onnxruntime.SessionOptions(), np.ones((4, 1, 8, 8), np.float32)
    with profile_folder() as folder:
        enable_profiling(options, folder)
        session = onnxruntime.InferenceSession(str(path), options, providers=[CUDA, CPU])
        assert session.get_providers()[0] == CUDA
        return misplaced_nodes(*profile_run(session, {"x": image}), CUDA)


def test_plain_model_runs_on_the_gpu_only(tmp_path: Path) -> None:
    assert _misplaced_nodes(_model(tmp_path / "m.onnx", "Relu")) == []


def test_operator_without_cuda_is_found_on_the_cpu(tmp_path: Path) -> None:
    assert [node.name for node in _misplaced_nodes(_model(tmp_path / "m.onnx", "Asinh"))] == ["last"]


def test_outputs_bound_to_the_gpu_equal_those_of_the_cpu(tmp_path: Path) -> None:
    path = str(_model(tmp_path / "m.onnx", "Relu"))
    image = np.random.default_rng(1).random((5, 1, 8, 8)).astype(np.float32)
    on_gpu = onnxruntime.InferenceSession(path, providers=[CUDA, CPU])
    expected = onnxruntime.InferenceSession(path, providers=[CPU]).run(None, {"x": image})[0]
    np.testing.assert_allclose(
        session.run_bound(on_gpu, ["y"], {"x": image}, "cuda")[0], expected, rtol=1e-2, atol=1e-3
    )


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    codec = (Path(__file__).parents[2] / "examples/digits/codec.py").read_text()
    return open_bundle(build(tmp_path / "bundle", "DigitsCodec", codec, [np.zeros((8, 8)).tolist()] * 2, digits))


def images(rows: int, seed: int = 0) -> dict[str, Any]:
    return {"image": np.random.default_rng(seed).random((rows, 1, 8, 8)).astype(np.float32)}


def assert_answers_like_the_cpu(found: dict[str, Any], bundle: Bundle, inputs: dict[str, Any]) -> None:
    expected = Session(bundle, "cpu", 1).run(inputs)["logits"]
    np.testing.assert_allclose(found["logits"], expected, rtol=1e-2, atol=1e-2)  # the GPU computes in TF32


@pytest.mark.skipif(bool(NO_TENSORRT), reason=NO_TENSORRT or "-")
def test_tensorrt_answers_like_the_cpu_and_keeps_its_engine(
    bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    engines: list[dict[str, int]] = []
    for _ in range(2):
        began = time.perf_counter()
        on_tensorrt = Session(bundle, "tensorrt", 1)
        print(f"loaded in {time.perf_counter() - began:.2f} s")
        assert on_tensorrt.provider == TENSORRT
        for rows in (1, 5, 32):
            assert_answers_like_the_cpu(on_tensorrt.run(images(rows)), bundle, images(rows))
        engines.append({path.name: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*.engine")})
    assert engines[0]
    assert engines[0] == engines[1]


@pytest.fixture
def predictor(bundle: Bundle) -> Predictor:
    loaded = Predictor(bundle, Session(bundle, "cuda", 1))
    capture_graphs(bundle, loaded)
    return loaded


def test_graphs_answer_like_the_cpu_at_every_size(bundle: Bundle, predictor: Predictor) -> None:
    graphs = predictor.session._graphs
    assert graphs is not None
    assert len(graphs._graphs) == 6
    for seed, rows in enumerate((1, 3, 32, 1, 2, 32, 5, 4)):  # with and without a graph
        found = predictor.run(images(rows, seed))
        assert_answers_like_the_cpu(found, bundle, images(rows, seed))


def test_inputs_are_copied_from_page_locked_memory(predictor: Predictor) -> None:
    predictor.run(images(3))
    pinned = predictor.session._pinned
    assert pinned is not None
    buffer, owner = pinned._buffers["image"]
    kind = ctypes.c_uint()  # CU_POINTER_ATTRIBUTE_MEMORY_TYPE is 2, CU_MEMORYTYPE_HOST is 1
    code = ctypes.CDLL("libcuda.so.1").cuPointerGetAttribute(ctypes.byref(kind), 2, ctypes.c_uint64(owner.data_ptr()))
    assert (code, kind.value) == (0, 1)  # an error for pageable memory, which the driver does not know
    assert buffer.nbytes >= images(3)["image"].nbytes


def test_models_run_at_the_same_time_each_on_its_stream(bundle: Bundle) -> None:
    sessions = [Session(bundle, "cuda", 1) for _ in range(2)]
    for one in sessions:
        assert one._session.get_provider_options()[CUDA]["use_ep_level_unified_stream"] == "1"

    def run(number: int) -> tuple[int, Any]:
        return number, sessions[number % 2].run(images(1 + number % 7, number))

    with ThreadPoolExecutor(8) as pool:
        for number, found in pool.map(run, range(100)):
            assert_answers_like_the_cpu(found, bundle, images(1 + number % 7, number))
