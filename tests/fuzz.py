"""Every parser of the service under random bytes: `make fuzz MINUTES=10`, with atheris, which follows their coverage.

Each target may refuse what it gets with the errors that it is documented to raise; any other one is a bug. What was
found to reach new code is kept in `.fuzz/`, and the next run begins with it. `make test` gives each target a few.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gzip
import subprocess
import sys
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import orjson
from google.protobuf.message import DecodeError

from pipeline.contract.signature import Limits, Runtime, Signature, TensorSpec
from pipeline.system.errors import InvalidPayload
from serve.errors import RequestError
from serve.grpc import messages, open_inference
from serve.limits import SLICE_BYTES, SMALL_BYTES, BodyLimits, message_memory
from serve.llm.openai_api import parse_chat, parse_completion
from serve.protocol import embeddings, v1, v2, v2_json
from serve.request_body import Inflater
from serve.request_context import parse_grpc_timeout, parse_timeout_header
from serve.wire.http2.frames import ConnectionFault
from serve.wire.http2.hpack import Decoder, HpackError
from tests.serve.wire.http1.fakes import Application, connect
from tests.serve.wire.http2.frames import CLIENT_PREFACE, open_connection, request
from tests.serve.wire.transport import FakeTransport

SIGNATURE = Signature(
    inputs=(
        TensorSpec(name="image", datatype="FP32", shape=("batch", 1, 2, 2)),
        TensorSpec(name="text", datatype="BYTES", shape=("batch",)),
        TensorSpec(name="ids", datatype="INT64", shape=("batch", "length")),
    ),
    outputs=(TensorSpec(name="logits", datatype="FP32", shape=("batch", 10)),),
    codec="Codec",
    limits=Limits(max_batch_size=8, max_body_bytes=1 << 20),
    runtime=Runtime(),
)
REFUSALS = (InvalidPayload, RequestError)


@dataclass(frozen=True)
class Target:
    run: Callable[[bytes], object]
    seeds: Sequence[bytes]
    refusals: tuple[type[Exception], ...] = REFUSALS

    def __call__(self, data: bytes) -> None:
        with contextlib.suppress(*self.refusals):
            self.run(data)


@cache
def _loop() -> asyncio.AbstractEventLoop:
    return asyncio.new_event_loop()


def _http1(data: bytes) -> None:
    async def exchange() -> None:
        transport = FakeTransport()
        connection = connect(Application(), transport)
        for piece in (data[: len(data) // 2], data[len(data) // 2 :]):
            connection.data_received(piece)
            await asyncio.sleep(0)
        for _ in range(3):
            await asyncio.sleep(0)
        assert b" 500 " not in transport.written
        transport.close()
        await asyncio.sleep(0)

    _loop().run_until_complete(exchange())


def _http2(data: bytes) -> None:
    open_connection().send(data)


def _v2(data: bytes) -> None:
    """An odd first byte: raw tensors follow the JSON."""
    length = str(data.rfind(b"}")) if data[:1] and data[0] % 2 else None
    v2.parse(data[1:], length, "net", SIGNATURE).arrays(SIGNATURE)


def _message(data: bytes) -> None:
    request = open_inference.message_class("ModelInferRequest").FromString(data)
    messages.parse(request, SIGNATURE).arrays(SIGNATURE)


def _fields(data: bytes) -> None:
    large = data + b":\x80\x80\x04" + bytes(SMALL_BYTES)  # raw contents: a small message is not counted
    message_memory(large, 1000, open_inference.RAW_CONTENTS_FIELD, open_inference.TENSOR_FIELDS)


def _inflated(data: bytes) -> None:
    inflater = Inflater("gzip" if data[:1] < b"\x80" else "deflate", BodyLimits(8 << 20, inflated=1 << 20))
    for part in inflater.feed(data[1:]):
        assert len(part) <= SLICE_BYTES
    inflater.end()


TENSORS: list[dict[str, Any]] = [
    {"name": "image", "datatype": "FP32", "shape": [1, 1, 2, 2], "data": [[[[0.5, 1], [2, 3e9]]]]},
    {"name": "text", "datatype": "BYTES", "shape": [1], "data": ["a\u00e9"]},
    {"name": "ids", "datatype": "INT64", "shape": [1, 3], "data": [1, 2, -3], "parameters": {"a": True}},
]
V2 = orjson.dumps({"id": "7", "inputs": TENSORS, "outputs": [{"name": "logits", "parameters": {"binary_data": True}}]})
RAW = orjson.dumps({"inputs": [{**TENSORS[0], "parameters": {"binary_data_size": 16}, "data": None}]})
TYPED = {"FP32": "fp32_contents", "BYTES": "bytes_contents", "INT64": "int64_contents"}
VALUES = {"image": [0.5, 1, 2, 3], "text": [b"a"], "ids": [1, 2, 3]}
MESSAGE = open_inference.message_class("ModelInferRequest")(
    model_name="net",
    inputs=[
        {**{key: one[key] for key in ("name", "datatype", "shape")}, "contents": {TYPED[one["datatype"]]: values}}
        for one in TENSORS
        for values in [VALUES[str(one["name"])]]
    ],
).SerializeToString()
POST = b"POST /v2/models/net/infer HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\n\r\nabc"
CHUNKED = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n3;a=b\r\nabc\r\n0\r\na: b\r\n\r\n"
CHAT = orjson.dumps({"model": "m", "messages": [{"role": "user", "content": "a"}], "stream": True, "temperature": 0.5})
PROMPTS = orjson.dumps({"model": "m", "prompt": ["a", "b"], "max_tokens": 3, "stop": "c", "logit_bias": {"7": 1}})
TEXTS = orjson.dumps({"model": "m", "input": ["a"], "encoding_format": "base64"})

TARGETS: dict[str, Target] = {
    "http1": Target(_http1, [POST + POST, CHUNKED, b"GET / HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\n\r\n"]),
    "http2": Target(_http2, [request(1), request(1)[:20], CLIENT_PREFACE], (ConnectionFault,)),
    "hpack": Target(
        lambda data: Decoder(4096).decode(data), [bytes.fromhex("828684418cf1e3c2e5f23a6ba0ab90f4ff")], (HpackError,)
    ),
    "v1": Target(v1.parse, [b'{"instances": [[1, 2.5e3, null], "a\\u00e9"], "signature_name": "serving_default"}']),
    "v2": Target(_v2, [b"0" + V2, b"1" + RAW + bytes(16)]),
    "v2 long": Target(
        lambda data: v2_json.read_v2_json(data + b" " * v2_json.LONG_LIST_BYTES, SIGNATURE), [V2, b'{"inputs":[]}']
    ),
    "message": Target(_message, [MESSAGE], (*REFUSALS, DecodeError)),
    "message fields": Target(_fields, [MESSAGE]),
    "inflate": Target(_inflated, [b"\0" + gzip.compress(V2), b"\xff" + zlib.compress(V2)]),
    "completion": Target(parse_completion, [PROMPTS]),
    "chat": Target(parse_chat, [CHAT]),
    "embeddings": Target(embeddings.parse, [TEXTS]),
    "timeout": Target(parse_timeout_header, [b"0.5", b"1e3"]),
    "grpc timeout": Target(parse_grpc_timeout, [b"100m", b"1H"]),
}


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="fuzz the parsers of the service")
    parser.add_argument("--minutes", type=float, default=5.0, help="for all targets together")
    parser.add_argument("--target", choices=list(TARGETS), action="append", help="only this one; may be given again")
    parser.add_argument("--corpus", type=Path, default=Path(".fuzz"), help="where inputs are kept")
    options = parser.parse_args(argv)
    names = options.target or list(TARGETS)
    failed = []
    for name in names:
        corpus, seconds = options.corpus / name.replace(" ", "-"), round(options.minutes * 60 / len(names))
        print(f"== {name}, {seconds} s", flush=True)
        corpus.mkdir(parents=True, exist_ok=True)
        for number, seed in enumerate(TARGETS[name].seeds):
            (corpus / f"seed-{number}").write_bytes(seed)
        limits = ["-max_len=65536", "-timeout=10", "-rss_limit_mb=4096", f"-max_total_time={seconds}"]
        arguments = [name, str(corpus), f"-artifact_prefix={corpus}-", *limits]
        if subprocess.run([sys.executable, "-c", _FUZZ, *arguments], check=False).returncode:
            failed.append(name)
    print(f"failed: {', '.join(failed)}; what made them fail is in {options.corpus}" if failed else "no target failed")
    return int(bool(failed))


# A process for each target: atheris follows the coverage of what is imported under it.
_FUZZ = """
import sys, atheris
with atheris.instrument_imports(include=["serve"]):
    from tests.fuzz import TARGETS
atheris.Setup(sys.argv[:1] + sys.argv[2:], TARGETS[sys.argv[1]])
atheris.Fuzz()
"""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
