"""Malformed gRPC calls: each gets a status with a message, and none harms the server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
import psutil
import pytest
from kserve.protocol.grpc import grpc_predict_v2_pb2 as pb

if TYPE_CHECKING:
    from tests.serve.conftest import Running


INVALID, UNKNOWN = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND
TOO_MUCH = grpc.StatusCode.RESOURCE_EXHAUSTED
BIG = (2**31, 2**32, 2**62, 2**63 - 1)
Case = tuple[Any, grpc.StatusCode, str]


def tensor(**changes: Any) -> Any:
    fields = {"name": "image", "datatype": "FP32", "shape": [1, 1, 8, 8], **changes}
    return {key: value for key, value in fields.items() if value is not None}


def typed(*inputs: Any, **fields: Any) -> Any:
    contents = {"fp32_contents": [0.5] * 64}
    given = [one if "contents" in one else {**one, "contents": contents} for one in inputs or [tensor()]]
    return pb.ModelInferRequest(model_name=fields.pop("model_name", "tiny"), inputs=given, **fields)


def raw(*inputs: Any, sizes: tuple[int, ...] = (256,), **fields: Any) -> Any:
    contents = [b"\0" * size for size in sizes]
    return pb.ModelInferRequest(model_name="tiny", inputs=inputs or [tensor()], raw_input_contents=contents, **fields)


def cases() -> Iterator[Case]:
    yield from _models_and_versions()
    for make in (typed, raw):
        yield from _tensors(make)
    yield from _contents()
    yield from _parameters()
    yield raw(sizes=(4 << 20,)), TOO_MUCH, "larger than max"
    yield typed(tensor(contents={"fp32_contents": [0.5] * 100_000})), TOO_MUCH, "larger than max"
    yield pb.ModelInferRequest(model_name="tiny", id="7" * 1_000_000), TOO_MUCH, "larger than max"


def _models_and_versions() -> Iterator[Case]:
    for name in ("", "other", "TINY", "tiny ", "../tiny", "tiny/versions/1", "t\u00fdny", "x" * 5000, "tiny\0"):
        yield typed(model_name=name), UNKNOWN, "model"
    for version in ("7", "-1", "0", "latest", "x" * 5000, "../1", " "):
        yield typed(model_version=version), UNKNOWN, "version"


def _tensors(make: Any) -> Iterator[Case]:
    yield make(tensor(), tensor(), **({"sizes": (256, 256)} if make is raw else {})), INVALID, "image"
    for name in ("", "picture", "IMAGE", "image ", "x" * 20_000 + "\u00e9\n"):
        yield make(tensor(name=name)), INVALID, "input"
    for datatype in (
        "",
        "FP16",
        "FP64",
        "INT8",
        "UINT8",
        "INT64",
        "BOOL",
        "BYTES",
        "BF16",
        "fp32",
        "float",
        "x" * 5000,
    ):
        yield make(tensor(datatype=datatype)), INVALID, ""
    for size in (0, -1, -(2**63), 2, 17, *BIG):
        yield make(tensor(shape=[size, 1, 8, 8])), INVALID, "image"
        yield make(tensor(shape=[1, 1, size, 8])), INVALID, "image"
    yield make(tensor(shape=[2**32, 2**32, 8, 8])), INVALID, "image"
    for shape in ([], [64], [1, 64], [1, 8, 8], [1, 1, 1, 8, 8], [1, 1, 64, 1], [1] * 2000, [0] * 64):
        yield make(tensor(shape=shape)), INVALID, "image"
    for wanted in (["probabilities"], ["logits", "logits"], [""], ["LOGITS"], ["logits", "more"]):
        yield make(outputs=[{"name": name} for name in wanted]), INVALID, "outputs"


def _contents() -> Iterator[Case]:
    for size in (0, 1, 4, 252, 255, 257, 260, 512, 4096):
        yield raw(sizes=(size,)), INVALID, "image"
    for sizes in ((256, 256), (128, 128), (256, 0), (0, 256)):
        yield raw(sizes=sizes), INVALID, "raw_input_contents"
    both = tensor(contents={"fp32_contents": [0.5] * 64})
    yield raw(both), INVALID, "image: has contents beside raw_input_contents"
    for datatype in ("FP16", "BF16"):
        yield typed(tensor(datatype=datatype)), INVALID, f"image: {datatype} must be in raw_input_contents"
    beyond = tensor(contents={"fp32_contents": [1000.5] * 64})
    yield typed(beyond), INVALID, "indices element out of data bounds"
    for count in (0, 1, 63, 65, 128, 640):
        yield typed(tensor(contents={"fp32_contents": [0.5] * count})), INVALID, "image"
    for field, value in (
        ("bool_contents", True),
        ("int_contents", 1),
        ("int64_contents", 1),
        ("uint_contents", 1),
        ("uint64_contents", 1),
        ("fp64_contents", 0.5),
        ("bytes_contents", b"\xff"),
    ):
        named = f"image: FP32 must be in fp32_contents, not in {field}"
        yield typed(tensor(contents={field: [value] * 64})), INVALID, named
    yield pb.ModelInferRequest(model_name="tiny"), INVALID, "image"
    yield pb.ModelInferRequest(model_name="tiny", raw_input_contents=[b"\0" * 256]), INVALID, "raw_input_contents"


def _parameters() -> Iterator[Case]:
    for wrong in ({"int64_param": -1}, {"string_param": "10"}, {"bool_param": True}):
        yield typed(parameters={"timeout": wrong}), INVALID, "timeout"
    shared = tensor(parameters={"shared_memory_region": {"string_param": "r"}})
    yield raw(shared), INVALID, "shared_memory_region' is not supported"


CASES = list(cases())


@pytest.mark.parametrize(("message", "code", "named"), CASES, ids=map(str, range(len(CASES))))
def test_malformed_call_is_rejected_with_a_message(stub: Any, message: Any, code: grpc.StatusCode, named: str) -> None:
    with pytest.raises(grpc.RpcError) as error:
        stub.ModelInfer(message, timeout=60)
    assert error.value.code() is code, (str(message)[:300], error.value.details())
    assert named in error.value.details()
    assert " " in error.value.details()
    assert len(error.value.details()) <= 501, "of bounded length"


def test_invalid_protobuf_is_rejected(server: Running) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        for path in ("ModelInfer", "ModelMetadata"):
            call = channel.unary_unary(f"/inference.GRPCInferenceService/{path}")
            for garbage in (b"\xff" * 100, b"\x0a\xff", b"not protobuf"):
                with pytest.raises(grpc.RpcError) as error:
                    call(garbage, timeout=60)
                assert (error.value.code(), error.value.details()) == (INVALID, f"the bytes are no message of {path}")


def test_malformed_calls_leak_no_memory(server: Running, stub: Any) -> None:
    sizes = []
    for _ in range(4):
        for message, _, _ in CASES:
            with pytest.raises(grpc.RpcError):
                stub.ModelInfer(message, timeout=60)
        sizes.append(psutil.Process(server.process.pid).memory_info().rss)
    answer = stub.ModelInfer(raw(), timeout=60)
    assert np.frombuffer(answer.raw_output_contents[0], np.float32).tolist() == [0.0] * 10
    assert sizes[3] - sizes[1] < 4 << 20, sizes  # at first, caches fill up
    assert "Traceback" not in server.log


@pytest.mark.parametrize("compression", [grpc.Compression.Gzip, grpc.Compression.Deflate])
def test_decompression_bomb_is_rejected(stub: Any, compression: Any) -> None:
    with pytest.raises(grpc.RpcError) as error:
        stub.ModelInfer(raw(sizes=(50 << 20,)), timeout=60, compression=compression)
    assert error.value.code() is TOO_MUCH
    assert stub.ModelInfer(raw(), timeout=60, compression=compression).model_name == "tiny"
