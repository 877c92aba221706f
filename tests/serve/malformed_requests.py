"""Malformed requests: a list by hand, and many more made from valid ones by one change each."""

from __future__ import annotations

import copy
import json
import urllib.parse
from collections.abc import Iterator
from typing import Any

V1, V2 = "/v1/models/tiny:predict", "/v2/models/tiny/infer"
JSON = {"content-type": "application/json"}
BINARY = "inference-header-content-length"


def image(**changes: Any) -> dict[str, Any]:
    return {"name": "image", "shape": [1, 1, 8, 8], "datatype": "FP32", "data": [0.5] * 64} | changes


def v2(*inputs: Any, **fields: Any) -> bytes:
    return json.dumps({"inputs": list(inputs), **fields}).encode()


def v1(instances: Any) -> bytes:
    return json.dumps({"instances": instances}).encode()


ROW, PICTURE = [1] * 8, [[1] * 8] * 8
RAW = v2({"name": "image", "shape": [1, 1, 8, 8], "datatype": "FP32", "parameters": {"binary_data_size": 256}})

# path, body, headers, status, what the message must name
Chosen = tuple[str, bytes, dict[str, str], int, str]
CHOSEN: list[Chosen] = [
    (V1, b"", JSON, 400, "body"),
    (V1, b"{", JSON, 400, "body"),
    (V1, b"null", JSON, 400, "body"),
    (V1, b"[]", JSON, 400, "body"),
    (V1, b'"text"', JSON, 400, "body"),
    (V1, b"{}", JSON, 400, "instances"),
    (V1, b'{"instances": NaN}', JSON, 400, "body"),
    (V1, b'{"instances": [1e999]}', JSON, 400, "body"),
    (V1, b"\xff\xfe{}", JSON, 400, "body"),
    (V1, b'{"instances": "\\ud800"}', JSON, 400, "body"),
    (V1, b'{"instances": ' + b"[" * 30_000 + b"]" * 30_000 + b"}", JSON, 400, "body"),
    (V1, b'{"instances": ' + b"[" * 900 + b"]" * 900 + b"}", JSON, 400, "instances"),
    (V1, b'{"instances": ' + b"[" * 60 + b"]" * 60 + b"}", JSON, 400, "instances"),
    (V2, b'{"inputs": ' + b"[" * 64 + b"]" * 64 + b"}", JSON, 400, "inputs[0]"),
    (V2, b'{"inputs": [{"data": ' + b"[" * 30_000, JSON, 400, "nested too deeply"),
    (V2, v2(image(data=[0] * 9000 + [json.loads("[" * 70 + "]" * 70)])), JSON, 400, "image"),
    ("/v2/repository/index", b'{"ready": ' + b"[" * 64 + b"]" * 64 + b"}", JSON, 400, "ready"),
    (V1, b'{"instances": [[], []], "instances": 3}', JSON, 400, "instances"),
    (V1, b'{"instance": [1]}', JSON, 400, "instances"),
    (V1, v1(None), JSON, 400, "instances: must be a list"),
    (V1, v1({}), JSON, 400, "instances: must be a list"),
    (V1, v1([]), JSON, 400, "instances: the list is empty"),
    (V1, v1([[]]), JSON, 400, "instances"),
    (V1, v1([None]), JSON, 400, "instances"),
    (V1, v1([{}]), JSON, 400, "instances"),
    (V1, v1(["a"]), JSON, 400, "instances"),
    (V1, v1([10**400]), JSON, 400, "too large"),
    (V1, b'{"instances": [1' + b"0" * 5000 + b"]}", JSON, 400, "body: integer value out of range"),
    (V1, v1([PICTURE, ROW]), JSON, 400, "instances"),
    (V1, v1([ROW]), JSON, 400, "instances: each must be an 8×8 list of numbers, found shape"),
    (V1, v1([[[17] * 8] * 8]), JSON, 400, "instances"),
    (V1, v1([PICTURE] * 17), JSON, 400, "instances: 17 in one request exceed the limit of 16"),
    (V1, b'{"instances": [], "parameters": {}}', JSON, 400, "parameters"),
    (V1, json.dumps({"n" * 20_000: 1, "instances": [1]}).encode(), JSON, 400, "unknown field"),
    (V1, v1([PICTURE]), {"content-type": "text/plain"}, 415, "content-type"),
    (V1, v1([PICTURE]), {"content-type": "application/json; charset=utf-16"}, 415, "content-type"),
    (V1, v1([PICTURE]), {"content-type": ""}, 415, "content-type"),
    (V1, v1([PICTURE]), JSON | {"content-encoding": "br"}, 415, "content-encoding"),
    (V1, b" " * 100_001, JSON, 413, "body"),
    (V1, b"{}", JSON | {"content-length": "-5"}, 400, ""),
    ("/v1/models/other:predict", v1([PICTURE]), JSON, 404, "other"),
    ("/v1/models/tiny:explain", v1([PICTURE]), JSON, 404, "explain"),
    ("/v1/models/%00%ff:predict", v1([PICTURE]), JSON, 404, "odel"),
    ("/v2/models/tiny/versions/7/infer", v2(image()), JSON, 404, "no version '7'"),
    ("/v2/models/other/infer", v2(image()), JSON, 404, "other"),
    ("/v2/health/ready", b"{}", JSON, 405, "/v2/health/ready"),
    (V2, b"{}", JSON, 400, "inputs"),
    (V2, b'{"inputs": {}}', JSON, 400, "inputs"),
    (V2, v2(), JSON, 400, "image"),
    (V2, v2(1), JSON, 400, "inputs[0]"),
    (V2, v2(image(), image()), JSON, 400, "image"),
    (V2, v2(image(), image(name="more")), JSON, 400, "more"),
    (V2, v2(image(name="picture")), JSON, 400, "picture"),
    (V2, v2(image(name="n" * 20_000)), JSON, 400, "unknown input"),
    (V2, v2(image(name=7)), JSON, 400, "inputs[0].name"),
    (V2, v2(image(datatype="FP64")), JSON, 400, "datatype"),
    (V2, v2(image(datatype="fp32")), JSON, 400, "datatype"),
    (V2, v2(image(datatype="n" * 20_000)), JSON, 400, "datatype"),
    (V2, v2(image(datatype=None)), JSON, 400, "datatype"),
    (V2, v2(image(shape=[64])), JSON, 400, "shape"),
    (V2, v2(image(shape=[1, 1, 4, 16])), JSON, 400, "shape"),
    (V2, v2(image(shape=[-1, 1, 8, 8])), JSON, 400, "shape"),
    (V2, v2(image(shape=[1.5, 1, 8, 8])), JSON, 400, "shape"),
    (V2, v2(image(shape=[True, 1, 8, 8])), JSON, 400, "shape"),
    (V2, v2(image(shape=[2**63, 2**63, 8, 8])), JSON, 400, "shape"),
    (V2, v2(image(shape=[2, 1, 8, 8])), JSON, 400, "image"),
    (V2, v2(image(shape=[0, 1, 8, 8], data=[])), JSON, 400, "image"),
    (V2, v2(image(shape=[17, 1, 8, 8], data=[0] * 64 * 17)), JSON, 400, "limit of 16"),
    (V2, v2(image(data=[0] * 63)), JSON, 400, "image"),
    (V2, v2(image(data=["0"] * 64)), JSON, 400, "image"),
    (V2, v2(image(data=[None] * 64)), JSON, 400, "image"),
    (V2, v2(image(data=[True] * 64)), JSON, 400, "image"),
    (V2, v2(image(data=[1e300] * 64)), JSON, 400, "image"),
    (V2, v2(image(data=[1000.5] * 64)), JSON, 400, "indices element out of data bounds"),
    (V2, v2(image(data=None)), JSON, 400, "data"),
    (V2, v2(image(data={"0": 1})), JSON, 400, "inputs[0].data"),
    (V2, v2(image(extra=1)), JSON, 400, "extra"),
    (V2, v2(image(), outputs=[{"name": "probabilities"}]), JSON, 400, "probabilities"),
    (V2, v2(image(), outputs=[{"name": "n" * 20_000}]), JSON, 400, "unknown output"),
    (V2, v2(image(), outputs=[{"name": "logits"}] * 2), JSON, 400, "logits"),
    (V2, v2(image(), outputs="logits"), JSON, 400, "outputs"),
    (V2, v2(image(), id=5), JSON, 400, "id"),
    (V2, v2(image(), model_name="other"), JSON, 400, "model_name"),
    (V2, v2(image(), parameters=[]), JSON, 400, "parameters"),
    (V2, v2(image(parameters={"binary_data_size": 4})), JSON, 400, "binary_data_size"),
    (V2, RAW, JSON, 400, "binary_data_size"),
    (V2, RAW + b"\0" * 256, {BINARY: "abc"}, 400, BINARY),
    (V2, RAW + b"\0" * 256, {BINARY: str(len(RAW) + 257)}, 400, BINARY),
    (V2, RAW + b"\0" * 255, {BINARY: str(len(RAW))}, 400, "binary_data_size"),
    (V2, RAW + b"\0" * 257, {BINARY: str(len(RAW))}, 400, "1 raw bytes"),
    (V2, RAW + b"\0" * 256, {BINARY: str(len(RAW) - 1)}, 400, "body"),
    (V2, RAW + b"\0" * 256, {"content-type": "application/octet-stream"}, 415, "content-type"),
]  # fmt: skip

GOOD_V1 = v1([PICTURE])
GOOD_V2 = v2(image(), id="7", outputs=[{"name": "logits"}], parameters={"binary_data_output": False})
WRONG: tuple[Any, ...] = (None, True, -1, 1.5, 2**64, "x", "", [], ["x"], {}, {"x": 1}, [[1]])
LEGAL = {  # values of other fields
    ("id",): ("x", "", None),
    ("parameters",): ({}, {"x": 1}, None),
    ("outputs",): ([], None),
    ("outputs", 0, "parameters"): (None,),
    ("inputs", 0, "data", 3): (True, -1, 1.5, 2**64),
    ("parameters", "binary_data_output"): (True,),
}


def cases() -> Iterator[Chosen]:
    yield from CHOSEN
    yield from _cut_short()
    yield from _one_field_wrong()
    yield from _shapes()
    yield from _raw_sizes()
    yield from _heads()


def _cut_short() -> Iterator[Chosen]:
    """Yield truncated bodies, and bodies with something after their end."""
    for path, good in ((V1, GOOD_V1), (V2, GOOD_V2)):
        for end in range(1, len(good), max(1, len(good) // 25)):
            yield path, good[:end], JSON, 400, "body"
        for more in (b"}", b"x", b"{}", b"\0", b",", b"\xef\xbb\xbf"):
            yield path, good + more, JSON, 400, "body"
        for flipped in (b"\xef\xbb\xbf" + good, good.replace(b'"', b"'"), good.replace(b":", b"="), good[::-1]):
            yield path, flipped, JSON, 400, "body"
        for number in (b"NaN", b"Infinity", b"-Infinity", b"1e999", b"0x1", b"01", b"+1", b"1.", b".5", b"1_0", b"--1"):
            yield (
                path,
                good.replace(b"[1,", b"[" + number + b",").replace(b"[0.5,", b"[" + number + b","),
                JSON,
                400,
                "",
            )


def _one_field_wrong() -> Iterator[Chosen]:
    good = json.loads(GOOD_V2)
    for place in _places(good):
        for wrong in WRONG:
            if not any(
                wrong is legal or (wrong == legal and type(wrong) is type(legal)) for legal in LEGAL.get(place, ())
            ):
                yield V2, json.dumps(_changed(good, place, wrong)).encode(), JSON, 400, ""
        if place[-1] in ("name", "shape", "datatype", "data", "inputs"):
            yield V2, json.dumps(_changed(good, place, ...)).encode(), JSON, 400, ""
    for where in ((), ("inputs", 0), ("outputs", 0)):
        for key in ("Name", "datatypes", "", "__proto__", "x" * 5000):
            yield V2, json.dumps(_changed(good, (*where, key), 1)).encode(), JSON, 400, "unknown field"


def _places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every field; of a long list one element is enough."""
    if place:
        yield place
    children = value.items() if isinstance(value, dict) else [*enumerate(value)] if isinstance(value, list) else []
    for key, child in children:
        if not isinstance(key, int) or len(value) < 5 or key == 3:
            yield from _places(child, (*place, key))


def _changed(good: Any, place: tuple[Any, ...], wrong: Any) -> Any:
    """Return a copy with another value; the ellipsis removes the field."""
    found = copy.deepcopy(good)
    parent = found
    for key in place[:-1]:
        parent = parent[key]
    if wrong is ...:
        del parent[place[-1]]
    else:
        parent[place[-1]] = wrong
    return found


def _shapes() -> Iterator[Chosen]:
    big = (2**31, 2**32, 2**62, 2**63 - 1, 2**63, 2**64, 10**30)
    for shape in (
        *([size, 1, 8, 8] for size in (0, -1, 2, 17, *big)),
        *([1, 1, size, 8] for size in (0, -8, 7, 9, *big)),
        *([1, 1, 8, size] for size in big),
        *([], [64], [1, 64], [1, 8, 8], [1, 1, 1, 8, 8], [1, 1, 64, 1], [1, 1, 8, 8, 0], [1] * 2000),
    ):
        yield V2, v2(image(shape=shape)), JSON, 400, ""
        yield V2, v2(image(shape=shape, data=[])), JSON, 400, ""
    for data in (
        [0.5] * 63,
        [0.5] * 65,
        [[0.5] * 8] * 7,
        [[0.5] * 8] * 9,
        [[0.5] * 8, [0.5] * 7] * 4,
        [[[[[0.5] * 64]]]],
    ):
        yield V2, v2(image(data=data)), JSON, 400, ""
    for datatype in (
        "FP16",
        "FP64",
        "INT8",
        "UINT8",
        "INT64",
        "BOOL",
        "BYTES",
        "BF16",
        "float32",
        "FP32 ",
        "FP",
        "NONE",
    ):
        yield V2, v2(image(datatype=datatype)), JSON, 400, "datatype"


def _raw_sizes() -> Iterator[Chosen]:
    raw = b"\0" * 256
    size: Any
    for size in (None, True, -1, 0, 4, 255, 257, 260, 512, 2**31, 2**63, 10**30, "256", 256.0, [], {}):
        head = v2(image(data=None, parameters={"binary_data_size": size}))
        yield V2, head + raw, {BINARY: str(len(head))}, 400, ""
    for length in (
        "",
        " ",
        "-1",
        "+5",
        "1e2",
        "0x10",
        "0",
        "1",
        "9" * 30,
        "9" * 5000,
        str(len(RAW) - 1),
        str(len(RAW) + 1),
        "\u00b2",
    ):
        yield V2, RAW + raw, {BINARY: length}, 400, ""
    for size in (0, 1, 4, 128, 252, 255, 257, 260, 512, 4096):
        yield V2, RAW + b"\0" * size, {BINARY: str(len(RAW))}, 400, ""


def _heads() -> Iterator[Chosen]:
    for path, good in ((V1, GOOD_V1), (V2, GOOD_V2)):
        for kind in (
            "text/html",
            "application/xml",
            "application/x-pickle",
            "multipart/form-data; boundary=x",
            "json",
            "*/*",
        ):
            yield path, good, {"content-type": kind}, 415, "content-type"
        for coding in ("br", "zstd", "gzip, gzip", "gzip, deflate", "deflate, identity", "snappy", "*"):
            yield path, good, JSON | {"content-encoding": coding}, 415, "content-encoding"
        for coding in ("gzip", "deflate"):
            yield path, good, JSON | {"content-encoding": coding}, 400, coding
        for seconds in ("0", "-1", "nan", "inf0", "", "soon", "1s", "0x1", "1,5", "-inf"):
            yield path, good, JSON | {"x-request-timeout": seconds}, 400, "x-request-timeout"
        yield path, good, JSON | {"x-much": "y" * 70_000}, 431, "head"
        yield path, good, JSON | {f"x-{number}": "y" for number in range(200)}, 431, "headers"
        yield path + "/" + "x" * 10_000, good, JSON, 414, "URL"
        for name in (
            "",
            "..",
            "../tiny",
            "%2e%2e%2ftiny",
            "tiny%00",
            "tiny/",
            "a" * 200,
            "t\u00fd",
            "tiny;x",
            "TINY",
            "tiny ",
        ):
            yield path.replace("tiny", quoted(name)), good, JSON, 404, ""
    for microseconds in (-1, 1.5, "10", True, 2**70 * -1):
        yield V2, v2(image(), parameters={"timeout": microseconds}), JSON, 400, "timeout"


def quoted(name: str) -> str:
    return urllib.parse.quote(name, safe="/%")
