"""Sends requests to a service that gives back what it is given all that Triton's own clients can ask; run as a program.

In a process of its own: the clients' protobuf descriptors have the names of kserve's. Prints what went wrong by check.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import tritonclient.grpc as over_grpc
import tritonclient.http as over_http
from tritonclient.utils import InferenceServerException, triton_to_np_dtype

Array = np.ndarray[Any, Any]
ROWS = 3


def sample(datatype: str, shape: list[int]) -> Array:
    sizes = [ROWS if axis == -1 else axis for axis in shape]
    if datatype == "BYTES":
        texts = np.resize(np.array(["héllo", "", "a b"], np.object_), sizes)
        found: Array = np.vectorize(str.encode, otypes=[np.object_])(texts)
        return found
    kind = np.float32 if datatype == "BF16" else triton_to_np_dtype(datatype)
    return np.resize(np.array([1, 0, 0, 1, 1]), sizes).astype(kind)


class Judge:
    """One client library; the two are alike but for their modules."""

    def __init__(self, module: Any, client: Any) -> None:
        self.module, self.client = module, client
        found = client.get_model_metadata("tiny", "1", **self._as_json())
        self.kinds = {one["name"]: one["datatype"] for one in found["inputs"]}
        shapes = {one["name"]: [int(axis) for axis in one.get("shape", [])] for one in found["inputs"]}
        self.arrays = {name: sample(kind, shapes[name]) for name, kind in self.kinds.items()}
        self.versions = found["versions"]

    def _as_json(self) -> dict[str, Any]:
        return {"as_json": True} if self.module is over_grpc else {}

    def inputs(self, **how: Any) -> list[Any]:
        tensors = []
        for name, array in self.arrays.items():
            tensors.append(self.module.InferInput(name, list(array.shape), self.kinds[name]))
            tensors[-1].set_data_from_numpy(array, **how)
        return tensors

    def same(self, result: Any, names: list[str] | None = None) -> None:
        for name in names or self.arrays:
            found = result.as_numpy(f"{name}_out")
            wanted = self.arrays[name]
            if self.kinds[name] == "BYTES":  # texts come out of JSON as str, of raw bytes as bytes
                found = np.vectorize(lambda x: x.encode() if isinstance(x, str) else x, otypes=[np.object_])(found)
            assert found.shape == wanted.shape, (name, found.shape)
            assert (found == wanted).all(), (name, found)

    def health(self) -> None:
        assert self.client.is_server_live()
        assert self.client.is_server_ready()
        assert self.client.is_model_ready("tiny")
        assert self.client.is_model_ready("tiny", "1")
        found = self.client.get_server_metadata(**self._as_json())
        assert found["name"] == "pipe", found
        assert "binary_tensor_data" in found["extensions"], found
        assert self.versions == ["1"], self.versions

    def raw(self) -> None:
        result = self.client.infer("tiny", self.inputs(), request_id="7", model_version="1", timeout=30_000_000)
        self.same(result)
        found = result.get_response(**self._as_json())
        assert found["id"] == "7", found
        assert found["model_version"] == "1", found

    def some_outputs(self) -> None:
        name = next(iter(self.arrays))
        result = self.client.infer("tiny", self.inputs(), outputs=[self.module.InferRequestedOutput(f"{name}_out")])
        self.same(result, [name])
        assert len(result.get_response(**self._as_json())["outputs"]) == 1

    def refused(self, ask: Callable[[], Any], sentence: str) -> None:
        received = "it was not refused"
        try:
            ask()
        except InferenceServerException as error:
            received = error.message()
        assert sentence in received, received

    def refusals(self) -> None:
        infer, inputs = self.client.infer, self.inputs()
        self.refused(lambda: infer("other", inputs), "no model 'other'")
        self.refused(lambda: infer("tiny", inputs, model_version="9"), "no version '9'")
        self.refused(lambda: infer("tiny", inputs[1:]), "is missing")
        self.refused(lambda: infer("tiny", inputs, sequence_id=5), "the service keeps no state")
        self.refused(lambda: self.client.load_model("tiny"), "never by clients")
        self.refused(lambda: self.client.unload_model("tiny"), "never by clients")
        wish = self.module.InferRequestedOutput(f"{next(iter(self.arrays))}_out", class_count=2)
        self.refused(lambda: infer("tiny", inputs, outputs=[wish]), "'classification' is not supported")


def http_json(judge: Judge) -> None:
    """The client itself sends neither FP16 nor BF16 as JSON."""
    tensors = []
    for name, array in judge.arrays.items():
        tensors.append(over_http.InferInput(name, list(array.shape), judge.kinds[name]))
        tensors[-1].set_data_from_numpy(array, binary_data=judge.kinds[name] in ("FP16", "BF16"))
    requested_outputs = [
        over_http.InferRequestedOutput(f"{name}_out", binary_data=judge.kinds[name] in ("FP16", "BF16"))
        for name in judge.arrays
    ]
    judge.same(judge.client.infer("tiny", tensors, outputs=requested_outputs))


def http_compressed(judge: Judge, coding: str) -> None:
    judge.same(
        judge.client.infer(
            "tiny", judge.inputs(), request_compression_algorithm=coding, response_compression_algorithm=coding
        )
    )


def http_many(judge: Judge) -> None:
    for waiting in [judge.client.async_infer("tiny", judge.inputs()) for _ in range(8)]:
        judge.same(waiting.get_result(timeout=60))


def http_index(judge: Judge) -> None:
    found = judge.client.get_model_repository_index()
    assert found == [{"name": "tiny", "version": "1", "state": "READY", "reason": ""}], found
    assert not judge.client.is_model_ready("other")
    assert not judge.client.is_model_ready("tiny", "9")


def grpc_many(judge: Judge) -> None:
    import queue

    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    for _ in range(8):
        judge.client.async_infer("tiny", judge.inputs(), lambda result, error: answers.put((result, error)))
    for _ in range(8):
        result, error = answers.get(timeout=60)
        assert error is None, error
        judge.same(result)


def grpc_compressed(judge: Judge, coding: str) -> None:
    judge.same(judge.client.infer("tiny", judge.inputs(), compression_algorithm=coding, client_timeout=60))


def grpc_unknown(judge: Judge) -> None:
    judge.refused(lambda: judge.client.is_model_ready("tiny", "9"), "no version '9'")
    judge.refused(lambda: judge.client.get_model_metadata("other"), "no model 'other'")


def main(http: str, grpc: str) -> dict[str, str]:
    received: dict[str, str] = {}
    with over_http.InferenceServerClient(http, concurrency=4) as one, over_grpc.InferenceServerClient(grpc) as two:
        for name, judge in (("http", Judge(over_http, one)), ("grpc", Judge(over_grpc, two))):
            shared = [judge.health, judge.raw, judge.some_outputs, judge.refusals]
            checks: dict[str, Callable[[], None]] = {check.__name__: check for check in shared}
            own = [http_json, http_many, http_index] if name == "http" else [grpc_many, grpc_unknown]
            checks |= {check.__name__: partial(check, judge) for check in own}
            packed: Any = http_compressed if name == "http" else grpc_compressed
            checks |= {f"{coding}": partial(packed, judge, coding) for coding in ("gzip", "deflate")}
            received |= {f"{name}.{check}": _outcome(run) for check, run in checks.items()}
    return received


def _outcome(check: Callable[[], None]) -> str:
    try:
        check()
    except Exception:  # every kind of failure is what is to be received
        return traceback.format_exc()
    return ""


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], sys.argv[2])))
