"""MLServer with a custom ONNX runtime and adaptive batching."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import onnxruntime
from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceRequest, InferenceResponse


class Net(MLModel):  # type: ignore[misc]  # mypy is not run where the peers are
    async def load(self) -> bool:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = int(os.environ["BENCH_THREADS"])
        self.session = onnxruntime.InferenceSession(
            os.environ["BENCH_MODEL"], options, providers=["CPUExecutionProvider"]
        )
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        logits: Any = self.session.run(["logits"], {"x": NumpyCodec.decode_input(payload.inputs[0])})[0]
        return InferenceResponse(model_name=self.name, outputs=[NumpyCodec.encode_output("logits", logits)])


if __name__ == "__main__":
    model, http_port, grpc_port, threads = sys.argv[1:5]
    folder = Path(tempfile.mkdtemp())
    settings = {"host": "127.0.0.1", "http_port": int(http_port), "grpc_port": int(grpc_port)}
    settings |= {"debug": False, "metrics_endpoint": None, "environments_dir": str(folder / "environments")}
    (folder / "settings.json").write_text(json.dumps(settings))
    implementation = "benchmarks.serve.servers.mlserver_peer.Net"
    batching = {"max_batch_size": 32, "max_batch_time": 0.001}
    (folder / "model-settings.json").write_text(
        json.dumps({"name": "net", "implementation": implementation, **batching})
    )
    os.environ |= {"BENCH_MODEL": model, "BENCH_THREADS": threads}
    os.chdir(folder)
    os.execv(Path(sys.executable).with_name("mlserver"), ["mlserver", "start", str(folder)])
