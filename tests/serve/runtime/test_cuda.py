from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime
import pytest

from pipeline.contract.bundle import Bundle
from pipeline.contract.signature import Signature, TensorSpec
from pipeline.service.process import send_request
from pipeline.system.processes import cuda_problem
from serve.runtime import cuda
from serve.runtime import session as runtime_session
from serve.runtime.cuda import CudaGraphs, PinnedMemory
from serve.runtime.loading import capture_graphs, fixed_batches, resize_inputs
from serve.runtime.predictor import Predictor
from serve.runtime.session import CPU, CUDA, Session

from ..conftest import Launcher

NO_CUDA = cuda_problem(onnxruntime.get_available_providers())


def test_onnxruntime_without_cuda_is_the_reported_reason() -> None:
    assert "onnxruntime-gpu has" in cuda_problem([CPU])


@pytest.mark.gpu
@pytest.mark.skipif(bool(NO_CUDA), reason=NO_CUDA)
def test_auto_runs_on_cuda(bundle: Bundle) -> None:
    assert (Session(bundle, "auto", 1).provider, NO_CUDA) == ("CUDAExecutionProvider", "")


@pytest.mark.skipif(not NO_CUDA, reason="CUDA works here")
def test_fallback_is_in_log_metadata_and_metrics(start: Launcher, bundle_path: Path) -> None:
    running = start(bundle_path, options=["--provider", "auto"])
    assert NO_CUDA in running.log
    _, _, metadata = send_request("127.0.0.1", running.port, "GET", "/v2/models/tiny")
    assert metadata["properties"]["provider"] == CPU
    assert metadata["properties"]["provider_fallback"] == NO_CUDA
    _, _, metrics = send_request("127.0.0.1", running.port, "GET", "/metrics")
    assert 'pipe_provider_fell_back{model="tiny",version="1"} 1.0' in metrics
    assert f'provider="{CPU}"' in metrics


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> PinnedMemory:
    """Memory of the CPU, from ONNX Runtime's allocator for it."""
    info = onnxruntime.OrtMemoryInfo(
        "Cpu", onnxruntime.OrtAllocatorType.ORT_DEVICE_ALLOCATOR, 0, onnxruntime.OrtMemType.DEFAULT
    )
    onnxruntime.create_and_register_allocator_v2(CPU, info, {}, onnxruntime.OrtArenaCfg({}))
    monkeypatch.setattr(cuda, "pinned_memory_info", lambda: info)
    return PinnedMemory()


def _address(array: Any) -> int:
    return int(array.__array_interface__["data"][0])


def test_page_locked_memory_is_reused_and_grows(pinned: PinnedMemory) -> None:
    first = pinned.copy("a", np.arange(6, dtype=np.float32).reshape(2, 3))
    assert (first.dtype, first.tolist()) == (np.float32, [[0, 1, 2], [3, 4, 5]])
    smaller = pinned.copy("a", np.array([[7, 8]], np.int64).T[::-1])
    assert (smaller.dtype, smaller.tolist()) == (np.int64, [[8], [7]])
    assert _address(smaller) == _address(first) != _address(pinned.copy("b", smaller))
    large = np.arange(1000)
    assert pinned.copy("a", large).tolist() == large.tolist()
    for array in (np.array(True), np.empty((0, 3), np.float32)):
        copied = pinned.copy("c", array)
        assert (copied.shape, copied.tolist()) == (array.shape, array.tolist())


@pytest.mark.skipif(not NO_CUDA, reason="CUDA works here")
def test_without_page_locked_memory_inputs_are_used_as_they_are(caplog: pytest.LogCaptureFixture) -> None:
    memory, array = PinnedMemory(), np.ones(3)
    assert memory.copy("a", array) is array
    assert memory.copy("a", array) is array
    assert caplog.text.count("not copied from page-locked memory") == 1


def test_graphs_read_their_own_tensors(bundle: Bundle, pinned: PinnedMemory) -> None:
    session = onnxruntime.InferenceSession(str(bundle.model), providers=[CPU])
    graphs = CudaGraphs(session, "cpu")
    batches = {rows: {"image": np.full((rows, 1, 8, 8), rows, np.float32)} for rows in (1, 4)}
    for inputs in batches.values():
        graphs.capture(inputs, session.run(None, inputs))
    addresses = [graph.inputs["image"].data_ptr() for graph in graphs._graphs.values()]
    for rows in (4, 1, 4):
        inputs = {"image": np.random.default_rng(rows).random((rows, 1, 8, 8)).astype(np.float32)}
        (found,) = graphs.run(["logits"], inputs, pinned) or []
        np.testing.assert_array_equal(found, session.run(None, inputs)[0])
    assert graphs.run(["logits"], {"image": np.ones((2, 1, 8, 8), np.float32)}, None) is None
    assert [graph.inputs["image"].data_ptr() for graph in graphs._graphs.values()] == addresses
    ids = [graph.options.get_run_config_entry("gpu_graph_id") for graph in graphs._graphs.values()]
    assert ids == ["1", "2"]


class _Claims:
    """A session on the CPU that claims to be on CUDA."""

    def __init__(self, bundle: Bundle, place: str = "Cuda") -> None:
        self._session = onnxruntime.InferenceSession(str(bundle.model), providers=[CPU])
        self._place = place

    def get_providers(self) -> list[str]:
        return [CUDA, CPU]

    def get_input_memory_infos(self) -> list[Any]:
        return [SimpleNamespace(name=self._place)]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)


def _predictor(bundle: Bundle, monkeypatch: pytest.MonkeyPatch, place: str = "Cuda") -> Predictor:
    """Return a predictor whose model seems to run on CUDA."""
    session = Session(bundle, "cpu", 1)
    session._session, session._device = _Claims(bundle), "cpu"

    def load(bundle: Bundle, _options: Any, providers: Any, **_: Any) -> Any:
        assert providers == [(CUDA, {"enable_cuda_graph": "1"}), CPU]
        return _Claims(bundle, place)

    monkeypatch.setattr(runtime_session, "_load", load)
    return Predictor(bundle, session)


def test_every_size_of_a_full_batch_becomes_a_graph(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    predictor = _predictor(bundle, monkeypatch)
    plain = predictor.session
    capture_graphs(bundle, predictor)
    graphs = predictor.session._graphs
    assert graphs is not None
    assert sorted(rows for ((rows, *_),) in graphs._graphs) == [1, 2, 4, 8, 16, 32]
    for rows in (1, 3, 32):
        inputs = resize_inputs(bundle.golden().inputs, bundle.signature, rows)
        np.testing.assert_array_equal(predictor.run(inputs)["logits"], plain.run(inputs)["logits"])


@pytest.mark.parametrize(
    ("place", "stale", "reason"),
    [("Cpu", False, "inputs are read in Cpu"), ("Cuda", True, "another answer than without")],
)
def test_model_that_cannot_be_a_graph_runs_without(
    bundle: Bundle,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    place: str,
    stale: bool,
    reason: str,
) -> None:
    predictor = _predictor(bundle, monkeypatch, place)
    plain = predictor.session
    if stale:
        monkeypatch.setattr(CudaGraphs, "run", lambda *_: [np.zeros((1, 10), np.float32)])
    capture_graphs(bundle, predictor)
    assert predictor.session is plain
    assert "cuda-graphs=off" in caplog.text
    assert reason in caplog.text


def _shaped(signature: Signature, *shapes: tuple[int | str, ...], datatype: Any = "FP32") -> Signature:
    specs = [TensorSpec(name=name, datatype=datatype, shape=shape) for name, shape in zip("xy", shapes, strict=True)]
    return signature.model_copy(update={"inputs": (specs[0],), "outputs": (specs[1],)})


@pytest.mark.parametrize(
    ("shapes", "datatype", "unbatched", "rows"),
    [
        ((("batch", 3), ("batch",)), "FP32", "", [1, 2, 4, 8, 16, 32]),
        ((("batch", 3), ("batch",)), "FP32", "rows depend on each other", [1]),
        ((("batch", "length"), ("batch",)), "FP32", "", []),
        ((("batch", 3), ("count", 3)), "FP32", "", []),
        (((2, 3), (2,)), "FP32", "", [2]),
        ((("batch", 3), ("batch",)), "BYTES", "", []),
    ],
)
def test_only_batches_of_fixed_shapes_are_captured(
    bundle: Bundle, shapes: Any, datatype: str, unbatched: str, rows: list[int]
) -> None:
    shaped = replace(bundle, signature=_shaped(bundle.signature, *shapes, datatype=datatype))
    object.__setattr__(shaped, "golden", lambda: SimpleNamespace(inputs={"x": np.ones((2, 3), np.float32)}))
    predictor: Any = SimpleNamespace(unbatched_reason=unbatched)
    assert [len(inputs["x"]) for inputs in fixed_batches(shaped, predictor)] == rows
