from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, numpy_helper

from pipeline.spec.bundle import Bundle, open_bundle
from pipeline.spec.errors import BundleError, InvalidPayload, ResourceError
from pipeline.spec.signature import TensorSpec
from serve.runtime.session import CPU, CUDA, Session, choose_providers, disagreements


def test_a_session_answers_as_onnx_runtime_does(bundle: Bundle) -> None:
    image = np.random.default_rng(0).random((3, 1, 8, 8)).astype(np.float32)
    raw = onnxruntime.InferenceSession(str(bundle.model), providers=[CPU])
    found = Session(bundle, "cpu", 1).run({"image": image})
    assert list(found) == ["logits"]
    np.testing.assert_array_equal(found["logits"], raw.run(None, {"image": image})[0])


def test_auto_takes_cuda_where_it_works_and_says_why_where_it_does_not() -> None:
    assert choose_providers("auto", "") == ([CUDA, CPU], "")
    assert choose_providers("auto", "no device") == ([CPU], "no device")
    assert choose_providers("cpu", "no device") == ([CPU], "")


def test_cuda_that_was_asked_for_and_cannot_work_is_an_error_with_its_reason() -> None:
    with pytest.raises(ResourceError, match=r"provider cuda: no device; .* --provider cpu"):
        choose_providers("cuda", "no device")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda tensor: tensor.update(name="picture"), "inputs are image; the signature has picture"),
        (lambda tensor: tensor.update(datatype="FP64"), "input image is FP32, the signature says FP64"),
        (lambda tensor: tensor.update(shape=["batch", 64]), "input image has 4 axes, the signature says 2"),
        (lambda tensor: tensor.update(shape=["batch", 1, 8, "w"]), "input image, axis 3 is 8, the signature says w"),
    ],
)
def test_a_model_that_is_not_the_signatures_is_refused(
    own_bundle: Path, seal: Callable[[Path], str], change: Callable[[Any], None], sentence: str
) -> None:
    path = own_bundle / "signature.json"
    signature = json.loads(path.read_text())
    change(signature["inputs"][0])
    path.write_text(json.dumps(signature))
    seal(own_bundle)
    with pytest.raises(BundleError, match=sentence):
        Session(open_bundle(own_bundle), "cpu", 1)


def test_a_file_that_is_no_model_is_refused_in_one_line(own_bundle: Path, seal: Callable[[Path], str]) -> None:
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
    with pytest.raises(BundleError, match="which is no plain file beside it"):
        Session(open_bundle(own_bundle), "cpu", 1)


def test_weights_beside_the_model_are_read(own_bundle: Path, seal: Callable[[Path], str]) -> None:
    before = Session(open_bundle(own_bundle), "cpu", 1)
    model = onnx.load(str(own_bundle / "model.onnx"))
    onnx.save(
        model, str(own_bundle / "model.onnx"), save_as_external_data=True, location="weights.bin", size_threshold=0
    )
    seal(own_bundle)
    image = np.ones((1, 1, 8, 8), np.float32)
    after = Session(open_bundle(own_bundle), "cpu", 1)
    np.testing.assert_array_equal(after.run({"image": image})["logits"], before.run({"image": image})["logits"])


def test_a_model_may_be_freer_than_its_signature() -> None:
    node = SimpleNamespace(name="x", type="tensor(float)", shape=["batch", None])
    fixed = TensorSpec(name="x", datatype="FP32", shape=("batch", 4))
    assert disagreements("input", [fixed], [node]) == []


def test_a_cuda_that_onnx_runtime_cannot_load_stops_the_start(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver and a device are there, as far as we can see; the libraries are not."""
    monkeypatch.setattr("serve.runtime.session.why_no_cuda", lambda _: "")
    monkeypatch.setattr("serve.runtime.session._load", _without_cuda)
    with pytest.raises(ResourceError, match=r"provider cuda: a device is there, but .* --provider cpu or auto"):
        Session(bundle, "cuda", 1)
    assert "a device is there" in Session(bundle, "auto", 1).fallback


def test_nodes_on_another_provider_stop_the_start_and_auto_names_them(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real session, all of it on the CPU, that says it has CUDA: what the nodes tell is believed, not the session."""
    monkeypatch.setattr("serve.runtime.session.why_no_cuda", lambda _: "")
    monkeypatch.setattr("serve.runtime.session._load", lambda *given: _Claims(_without_cuda(*given)))
    with pytest.raises(ResourceError, match=r"6 of the model's nodes run on another provider: .*MatMul.* and 1 more"):
        Session(bundle, "cuda", 1)
    assert "nodes run on another provider" in Session(bundle, "auto", 1).fallback


@pytest.mark.parametrize("device", ["", "cpu"])
def test_values_the_model_cannot_compute_with_are_the_clients_mistake_bound_or_not(bundle: Bundle, device: str) -> None:
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
    """A session that names CUDA first."""

    def __init__(self, session: Any) -> None:
        self._session = session

    def get_providers(self) -> list[str]:
        return [CUDA, CPU]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)
