"""Calls of Triton's own clients to a service that returns its inputs; run as a program, which prints errors by check.

It needs a process of its own, because the clients' protobuf descriptors have the names of kserve's.
Every public method of the four clients is called, and is answered or refused by name.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import queue
import sys
import traceback
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import grpc
import numpy as np
import tritonclient.grpc as over_grpc
import tritonclient.grpc.aio as over_grpc_aio
import tritonclient.http as over_http
import tritonclient.http.aio as over_http_aio
from tritonclient.utils import InferenceServerException, triton_to_np_dtype

Array = np.ndarray[Any, Any]
ROWS = 3
NUMBERS = ("UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP16", "BF16", "FP32", "FP64")

# Method, arguments, and a part of the error message if the call is refused.
_OPERATOR, _MEMORY = "never by clients", "this service shares no memory with clients"
_TRACES, _LOGS, _CONFIG = "traces are set by the OTEL_", "logs are set by --log-format", "have no Triton configuration"
CALLS: list[tuple[str, tuple[Any, ...], str]] = [
    ("is_server_live", (), ""),
    ("is_server_ready", (), ""),
    ("is_model_ready", ("tiny",), ""),
    ("is_model_ready", ("tiny", "1"), ""),
    ("get_server_metadata", (), ""),
    ("get_model_metadata", ("tiny",), ""),
    ("get_model_metadata", ("tiny", "1"), ""),
    ("get_model_repository_index", (), ""),
    ("get_inference_statistics", (), ""),
    ("get_inference_statistics", ("tiny",), ""),
    ("get_inference_statistics", ("tiny", "1"), ""),
    ("get_inference_statistics", ("other",), "no model 'other'"),
    ("get_model_config", ("tiny",), _CONFIG),
    ("get_model_config", ("tiny", "1"), _CONFIG),
    ("load_model", ("tiny",), _OPERATOR),
    ("unload_model", ("tiny",), _OPERATOR),
    ("get_trace_settings", (), _TRACES),
    ("get_trace_settings", ("tiny",), _TRACES),
    ("update_trace_settings", (None, {"trace_level": "TIMESTAMPS"}), _TRACES),
    ("update_trace_settings", ("tiny", {"trace_level": "TIMESTAMPS"}), _TRACES),
    ("get_log_settings", (), _LOGS),
    ("update_log_settings", ({"log_info": True},), _LOGS),
    ("get_system_shared_memory_status", (), _MEMORY),
    ("get_system_shared_memory_status", ("region",), _MEMORY),
    ("register_system_shared_memory", ("region", "/key", 16), _MEMORY),
    ("unregister_system_shared_memory", (), _MEMORY),
    ("unregister_system_shared_memory", ("region",), _MEMORY),
    ("get_cuda_shared_memory_status", (), _MEMORY),
    ("get_cuda_shared_memory_status", ("region",), _MEMORY),
    ("register_cuda_shared_memory", ("region", b"aGFuZGxl", 0, 16), _MEMORY),
    ("unregister_cuda_shared_memory", (), _MEMORY),
    ("unregister_cuda_shared_memory", ("region",), _MEMORY),
]
OFFLINE = {"close", "generate_request_body", "parse_response_body", "plugin", "register_plugin", "unregister_plugin"}


def sample(datatype: str, shape: list[int]) -> Array:
    sizes = [ROWS if axis == -1 else axis for axis in shape]
    if datatype == "BYTES":
        texts = np.resize(np.array(["héllo", "", "a b"], np.object_), sizes)
        found: Array = np.vectorize(str.encode, otypes=[np.object_])(texts)
        return found
    kind = np.float32 if datatype == "BF16" else triton_to_np_dtype(datatype)
    return np.resize(np.array([1, 0, 0, 1, 1]), sizes).astype(kind)


def check_answer(name: str, answer: Any) -> None:
    if name.startswith("is_"):
        assert answer is True, answer


def missing_methods(client: Any, called: set[str]) -> None:
    """Fail if the client has a public method that no check calls."""
    methods = {name for name in dir(client) if not name.startswith("_") and callable(getattr(client, name))}
    assert methods - called - OFFLINE == set(), methods - called - OFFLINE


class Judge:
    """Checks of one client library; HTTP and gRPC differ only in their modules."""

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
            if self.kinds[name] == "BYTES":  # texts are str in JSON, and bytes in raw data
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
        inputs[0].set_shared_memory("region", 16)
        self.refused(lambda: infer("tiny", inputs), "'shared_memory_region' is not supported: send the tensor itself")
        wish = self.module.InferRequestedOutput(f"{next(iter(self.arrays))}_out")
        wish.set_shared_memory("region", 16)
        self.refused(lambda: infer("tiny", self.inputs(), outputs=[wish]), "'shared_memory_region' is not supported")

    def call(self, name: str, args: tuple[Any, ...], sentence: str) -> None:
        method = getattr(self.client, name)
        if sentence:
            self.refused(lambda: method(*args), sentence)
        else:
            check_answer(name, method(*args))

    def classes(self) -> None:
        """The two largest values of each row of a number."""
        for name, kind in self.kinds.items():
            wish = self.module.InferRequestedOutput(f"{name}_out", class_count=2)
            if kind not in NUMBERS:
                self.refused(partial(self.client.infer, "tiny", self.inputs(), outputs=[wish]), "needs numbers")
                continue
            found = self.client.infer("tiny", self.inputs(), outputs=[wish]).as_numpy(f"{name}_out")
            values = self.arrays[name].reshape(ROWS, -1)
            assert found.shape == (ROWS, min(2, values.shape[1])), found.shape
            for row, strings in zip(values, found, strict=True):
                pairs = [string.decode().split(":") for string in strings]
                assert [float(value) for value, _ in pairs] == sorted(map(float, row), reverse=True)[:2], found
                assert all(float(row[int(index)]) == float(value) for value, index in pairs), found

    def statistics(self) -> None:
        count = partial(self.client.get_inference_statistics, "tiny", "1", **self._as_json())
        (before,) = count()["model_stats"]
        self.client.infer("tiny", self.inputs())
        (after,) = count()["model_stats"]
        counts = [int(one["inference_stats"]["success"]["count"]) for one in (before, after)]
        assert counts[1] == counts[0] + 1, counts
        assert int(after["inference_stats"]["compute_infer"]["ns"]) > 0, after
        assert int(after["last_inference"]) > 0, after

    def methods(self) -> None:
        called = {name for name, _, _ in CALLS} | {"infer", "async_infer"}
        streams = {"start_stream", "stop_stream", "async_stream_infer"} if self.module is over_grpc else set()
        missing_methods(self.client, called | streams)


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


def grpc_stream(judge: Judge) -> None:
    """Check that Triton's stream is refused with what to use instead."""
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    judge.client.start_stream(lambda result, error: answers.put((result, error)))
    try:
        with contextlib.suppress(InferenceServerException):  # it was refused before anything was sent
            judge.client.async_stream_infer("tiny", judge.inputs())
        _, error = answers.get(timeout=60)
        assert "ModelStreamInfer: this service answers one request at a time; use ModelInfer" in error.message(), error
    finally:
        judge.client.stop_stream()


def grpc_many(judge: Judge) -> None:
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


def main(http: str, rpc: str) -> dict[str, str]:
    received: dict[str, str] = {}
    with over_http.InferenceServerClient(http, concurrency=4) as one, over_grpc.InferenceServerClient(rpc) as two:
        for name, judge in (("http", Judge(over_http, one)), ("grpc", Judge(over_grpc, two))):
            shared = [judge.health, judge.raw, judge.some_outputs, judge.refusals]
            shared += [judge.classes, judge.statistics, judge.methods]
            checks: dict[str, Callable[[], None]] = {check.__name__: check for check in shared}
            own = [http_json, http_many, http_index] if name == "http" else [grpc_many, grpc_stream, grpc_unknown]
            checks |= {check.__name__: partial(check, judge) for check in own}
            packed: Any = http_compressed if name == "http" else grpc_compressed
            checks |= {f"{coding}": partial(packed, judge, coding) for coding in ("gzip", "deflate")}
            checks |= {_call_name(call): partial(judge.call, *call) for call in CALLS}
            received |= {f"{name}.{check}": _outcome(run) for check, run in checks.items()}
            received |= asyncio.run(check_aio(name, judge, http if name == "http" else rpc))
    return received


async def check_aio(name: str, judge: Judge, address: str) -> dict[str, str]:
    """Make the same calls with the client for asyncio."""
    module = over_http_aio if name == "http" else over_grpc_aio
    received = {}
    async with module.InferenceServerClient(address) as client:
        checks = {_call_name(call): partial(_call_aio, client, *call) for call in CALLS}
        checks |= {"infer": partial(_infer_aio, client, judge), "methods": partial(_methods_aio, client)}
        if name == "grpc":
            checks["stream_infer"] = partial(_stream_aio, client, judge)
        for check, run in checks.items():
            try:
                await run()
                received[f"{name}.aio.{check}"] = ""
            except Exception:  # any failure is the result of its check
                received[f"{name}.aio.{check}"] = traceback.format_exc()
    return received


async def _call_aio(client: Any, name: str, args: tuple[Any, ...], sentence: str) -> None:
    message = "it was not refused"
    try:
        answer = await getattr(client, name)(*args)
    except InferenceServerException as error:
        message = error.message()
    if sentence:
        assert sentence in message, message
    else:
        check_answer(name, answer)


async def _infer_aio(client: Any, judge: Judge) -> None:
    judge.same(await client.infer("tiny", judge.inputs()))


async def _stream_aio(client: Any, judge: Judge) -> None:
    async def requests() -> AsyncIterator[dict[str, Any]]:
        await asyncio.Event().wait()  # for ever: a write beside the refusal would hide it
        yield {"model_name": "tiny", "inputs": judge.inputs()}

    message = "it was not refused"
    try:
        async for _ in client.stream_infer(requests()):
            pass
    except grpc.RpcError as error:
        message = str(error)
    assert "ModelStreamInfer: this service answers one request at a time" in message, message


async def _methods_aio(client: Any) -> None:
    missing_methods(client, {name for name, _, _ in CALLS} | {"infer", "stream_infer"})


def _call_name(call: tuple[str, tuple[Any, ...], str]) -> str:
    return f"{call[0]}({', '.join(str(one) for one in call[1])})"


def _outcome(check: Callable[[], None]) -> str:
    try:
        check()
    except Exception:  # any failure is the result of its check
        return traceback.format_exc()
    return ""


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], sys.argv[2])))
