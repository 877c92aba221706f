"""ONNX Runtime sessions on the CPU; `tests/gpu` has the same on a device."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import serve.runtime.session as runtime_session
from pipeline.contract.bundle import Bundle, open_bundle
from pipeline.contract.signature import TensorSpec
from pipeline.system.errors import BundleError, InvalidPayload, ResourceError
from serve.runtime.session import CPU, CUDA, Session, choose_providers, disagreements
from tests.serve.special_models import deep


def _pair(first: int, second: int, operators: tuple[str, str]) -> onnx.ModelProto:
    graph = helper.make_graph(
        [helper.make_node(operators[0], ["a"], ["c"]), helper.make_node(operators[1], ["b"], ["d"])],
        "pair",
        [
            helper.make_tensor_value_info("a", first, ["batch", 3]),
            helper.make_tensor_value_info("b", second, ["batch"]),
        ],
        [
            helper.make_tensor_value_info("c", first, ["batch", 3]),
            helper.make_tensor_value_info("d", second, ["batch"]),
        ],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def _session(path: Path, second: int) -> Any:
    onnx.save(_pair(TensorProto.FLOAT, second, ("Neg", "Identity")), path / "pair.onnx")
    return onnxruntime.InferenceSession(str(path / "pair.onnx"), providers=["CPUExecutionProvider"])


@pytest.fixture
def session(tmp_path: Path) -> Any:
    return _session(tmp_path, TensorProto.INT64)


def test_bound_outputs_have_the_requested_order(session: Any) -> None:
    inputs = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.array([7, -8])}
    whole, real = runtime_session.run_bound(session, ["d", "c"], inputs, "cpu")
    assert whole.tolist() == [7, -8]
    np.testing.assert_array_equal(real, -inputs["a"])


def test_outputs_stay_valid_after_later_runs(session: Any) -> None:
    first = runtime_session.run_bound(session, ["c"], {"a": np.ones((2, 3), np.float32), "b": np.array([1, 1])}, "cpu")[
        0
    ]
    for value in range(20):
        runtime_session.run_bound(
            session, ["c"], {"a": np.full((2, 3), value, np.float32), "b": np.array([1, 1])}, "cpu"
        )
    assert (first == -1).all()


def test_concurrent_runs_do_not_mix_tensors(session: Any) -> None:
    def run(value: int) -> bool:
        inputs = {"a": np.full((value, 3), value, np.float32), "b": np.full(value, value)}
        real, whole = runtime_session.run_bound(session, ["c", "d"], inputs, "cpu")
        return bool((real == -value).all()) and real.shape == (value, 3) and whole.tolist() == [value] * value

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(run, [1 + number % 9 for number in range(100)]))


def test_string_tensors_cannot_be_bound(session: Any, tmp_path: Path) -> None:
    assert runtime_session.can_bind(session)
    assert not runtime_session.can_bind(_session(tmp_path, TensorProto.STRING))


def test_session_equals_onnx_runtime(bundle: Bundle) -> None:
    image = np.random.default_rng(0).random((3, 1, 8, 8)).astype(np.float32)
    raw = onnxruntime.InferenceSession(str(bundle.model), providers=[CPU])
    found = Session(bundle, "cpu", 1).run({"image": image})
    assert list(found) == ["logits"]
    np.testing.assert_array_equal(found["logits"], raw.run(None, {"image": image})[0])


def test_auto_prefers_cuda_and_reports_the_fallback() -> None:
    assert choose_providers("auto", "") == ([CUDA, CPU], "")
    assert choose_providers("auto", "no device") == ([CPU], "no device")
    assert choose_providers("cpu", "no device") == ([CPU], "")


def test_unavailable_cuda_is_an_error_if_requested() -> None:
    with pytest.raises(ResourceError, match=r"provider cuda: no device; .* --provider cpu"):
        choose_providers("cuda", "no device")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda tensor: tensor.update(name="picture"), "inputs are image; the signature has picture"),
        (lambda tensor: tensor.update(datatype="FP64"), "input image is FP32, the signature has FP64"),
        (lambda tensor: tensor.update(shape=["batch", 64]), "input image has 4 axes, the signature has 2"),
        (lambda tensor: tensor.update(shape=["batch", 1, 8, "w"]), "input image, axis 3 is 8, the signature has w"),
    ],
)
def test_model_must_match_the_signature(
    own_bundle: Path, seal: Callable[[Path], str], change: Callable[[Any], None], sentence: str
) -> None:
    path = own_bundle / "signature.json"
    signature = json.loads(path.read_text())
    change(signature["inputs"][0])
    path.write_text(json.dumps(signature))
    seal(own_bundle)
    with pytest.raises(BundleError, match=sentence):
        Session(open_bundle(own_bundle), "cpu", 1)


def test_invalid_model_file_is_rejected_in_one_line(own_bundle: Path, seal: Callable[[Path], str]) -> None:
    (own_bundle / "model.onnx").write_bytes(b"not a model")
    seal(own_bundle)
    with pytest.raises(BundleError, match="ONNX Runtime cannot load it") as caught:
        Session(open_bundle(own_bundle), "cpu", 1)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("absolute", [False, True])
def test_weights_outside_the_bundle_are_never_read(
    own_bundle: Path, seal: Callable[[Path], str], absolute: bool
) -> None:
    outside = own_bundle.parent / "outside.bin"
    outside.write_bytes(np.zeros((64, 10), np.float32).tobytes())
    weight = numpy_helper.from_array(np.zeros((64, 10), np.float32), "weight")
    weight.ClearField("raw_data")
    weight.data_location = TensorProto.EXTERNAL
    place = weight.external_data.add()
    place.key, place.value = "location", str(outside) if absolute else "../outside.bin"
    model = onnx.load(str(own_bundle / "model.onnx"))
    model.graph.initializer[0].CopyFrom(weight)
    (own_bundle / "model.onnx").write_bytes(model.SerializeToString())
    seal(own_bundle)
    with pytest.raises(BundleError, match="which is not a regular file next to it"):
        Session(open_bundle(own_bundle), "cpu", 1)


def test_external_weights_in_the_bundle_are_read(own_bundle: Path, seal: Callable[[Path], str]) -> None:
    before = Session(open_bundle(own_bundle), "cpu", 1)
    model = onnx.load(str(own_bundle / "model.onnx"))
    onnx.save(
        model, str(own_bundle / "model.onnx"), save_as_external_data=True, location="weights.bin", size_threshold=0
    )
    seal(own_bundle)
    image = np.ones((1, 1, 8, 8), np.float32)
    after = Session(open_bundle(own_bundle), "cpu", 1)
    np.testing.assert_array_equal(after.run({"image": image})["logits"], before.run({"image": image})["logits"])


def test_model_may_accept_more_than_its_signature() -> None:
    node = SimpleNamespace(name="x", type="tensor(float)", shape=["batch", None])
    fixed = TensorSpec(name="x", datatype="FP32", shape=("batch", 4))
    assert disagreements("input", [fixed], [node]) == []


def test_cuda_that_cannot_be_loaded_stops_the_start(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    """Driver and device seem to exist, but the libraries are missing."""
    monkeypatch.setattr("serve.runtime.session.cuda_problem", lambda _: "")
    monkeypatch.setattr("serve.runtime.session._load", _without_cuda)
    with pytest.raises(ResourceError, match=r"provider cuda: there is a device, but .* --provider cpu or auto"):
        Session(bundle, "cuda", 1)
    assert "there is a device" in Session(bundle, "auto", 1).fallback


def test_misplaced_nodes_stop_the_start_or_are_reported(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    """A session on the CPU that claims to have CUDA: the assignment of the nodes counts."""
    monkeypatch.setattr("serve.runtime.session.cuda_problem", lambda _: "")
    monkeypatch.setattr("serve.runtime.session._load", lambda *given: _Claims(_without_cuda(*given)))
    with pytest.raises(ResourceError, match=r"6 of the model's nodes run on another provider: .*MatMul.* and 1 more"):
        Session(bundle, "cuda", 1)
    assert "nodes run on another provider" in Session(bundle, "auto", 1).fallback


@pytest.mark.parametrize("device", ["", "cpu"])
def test_invalid_values_are_a_client_error(bundle: Bundle, device: str) -> None:
    session = Session(bundle, "cpu", 1)
    session._device = device  # bound to memory, as on a GPU
    good = session.run({"image": np.ones((1, 1, 8, 8), np.float32)})
    with pytest.raises(InvalidPayload, match="the model cannot compute with these values"):
        session.run({"image": np.full((1, 1, 8, 8), 1000, np.float32)})
    again = session.run({"image": np.ones((1, 1, 8, 8), np.float32)})
    np.testing.assert_array_equal(again["logits"], good["logits"])


def _without_cuda(bundle: Bundle, options: Any, providers: Any) -> Any:
    return onnxruntime.InferenceSession(str(bundle.model), options, providers=[CPU])


class _Claims:
    """Claims to have CUDA."""

    def __init__(self, session: Any) -> None:
        self._session = session

    def get_providers(self) -> list[str]:
        return [CUDA, CPU]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)


_LOAD = """
import sys
from pathlib import Path
from pipeline.contract.bundle import open_bundle
from serve.runtime.loading import load_predictor

def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))

before = peak()
load_predictor(open_bundle(Path(sys.argv[1])), None, None)
print((peak() - before) * 1024)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak memory is read from /proc")
def test_weights_beside_the_model_are_mapped_at_load(tmp_path: Path) -> None:
    """They are in memory once: the copy that ONNX Runtime lays out for its kernels."""
    weights = [np.full((1024, 1024), (1 + layer * 1e-5) / 1024, np.float32) for layer in range(32)]  # no two equal
    path = deep(tmp_path / "bundle", weights, beside=True)
    peak = subprocess.run([sys.executable, "-c", _LOAD, str(path)], check=True, capture_output=True, text=True).stdout
    assert int(peak) <= 1.2 * (path / "model.onnx.data").stat().st_size
