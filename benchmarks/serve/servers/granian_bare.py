"""A bare granian handler in one process or more: JSON in, the runtime, JSON out; no checks, limits or metrics."""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

import numpy as np
import onnxruntime
import orjson

_JSON = [("content-type", "application/json")]


@cache
def session() -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = int(sys.argv[4])
    return onnxruntime.InferenceSession(sys.argv[1], options, providers=["CPUExecutionProvider"])


async def app(_scope: Any, protocol: Any) -> None:
    tensor = orjson.loads(await protocol())["inputs"][0]
    kind = np.int64 if tensor["datatype"] == "INT64" else np.float32
    values = session().run(["logits"], {"x": np.array(tensor["data"], kind).reshape(tensor["shape"])})[0]
    output = {"name": "logits", "shape": values.shape, "datatype": "FP32", "data": values.ravel()}
    body = orjson.dumps({"model_name": "net", "outputs": [output]}, option=orjson.OPT_SERIALIZE_NUMPY)
    protocol.response_bytes(200, _JSON, body)


if __name__ == "__main__":
    from granian import Granian
    from granian.constants import Interfaces, Loops

    Granian(
        "benchmarks.serve.servers.granian_bare:app",
        "127.0.0.1",
        int(sys.argv[2]),
        interface=Interfaces.RSGI,
        workers=int(sys.argv[5]),
        loop=Loops.uvloop,
        log_enabled=False,
    ).serve()
