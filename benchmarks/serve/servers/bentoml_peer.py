"""BentoML: a service with one API that takes the V2 body."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import bentoml
import numpy as np
import onnxruntime


@bentoml.service(workers=1, traffic={"max_concurrency": 1024})
class Net:
    def __init__(self) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = int(os.environ["BENCH_THREADS"])
        self.session = onnxruntime.InferenceSession(
            os.environ["BENCH_MODEL"], options, providers=["CPUExecutionProvider"]
        )

    @bentoml.api  # type: ignore[untyped-decorator]
    def predict(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        tensor = inputs[0]
        kind = np.int64 if tensor["datatype"] == "INT64" else np.float32
        logits = self.session.run(["logits"], {"x": np.array(tensor["data"], kind).reshape(tensor["shape"])})[0]
        return {"outputs": [{"name": "logits", "data": logits.ravel().tolist()}]}


if __name__ == "__main__":
    os.environ |= {"BENCH_MODEL": sys.argv[1], "BENCH_THREADS": sys.argv[4], "BENTOML_DO_NOT_TRACK": "1"}
    argv = [
        "bentoml",
        "serve",
        "benchmarks.serve.servers.bentoml_peer:Net",
        "--host",
        "127.0.0.1",
        "--port",
        sys.argv[2],
    ]
    os.execv(Path(sys.executable).with_name("bentoml"), argv)
