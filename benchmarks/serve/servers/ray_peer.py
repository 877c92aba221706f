"""Ray Serve with its batching on."""

from __future__ import annotations

import signal
import sys
from typing import Any

import numpy as np
import onnxruntime
import ray
from ray import serve
from starlette.requests import Request


@serve.deployment(ray_actor_options={"num_cpus": 0}, max_ongoing_requests=1024)
class Net:
    def __init__(self, model: str, threads: int) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        self.session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])

    @serve.batch(max_batch_size=32, batch_wait_timeout_s=0.001)  # type: ignore[untyped-decorator]
    async def run(self, rows: list[Any]) -> list[Any]:
        return list(self.session.run(["logits"], {"x": np.concatenate(rows)})[0])

    async def __call__(self, request: Request) -> dict[str, Any]:
        tensor = (await request.json())["inputs"][0]
        kind = np.int64 if tensor["datatype"] == "INT64" else np.float32
        logits = await self.run(np.array(tensor["data"], kind).reshape(tensor["shape"]))
        return {"outputs": [{"name": "logits", "data": logits.tolist()}]}


if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=100 << 20)
    serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[2])})
    serve.run(Net.bind(sys.argv[1], int(sys.argv[4])), route_prefix="/")  # type: ignore[attr-defined]  # by the decorator
    signal.pause()
