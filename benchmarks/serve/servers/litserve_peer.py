"""LitServe with its batching on."""

from __future__ import annotations

import sys
from typing import Any

import litserve
import numpy as np
import onnxruntime


class Net(litserve.LitAPI):  # type: ignore[misc]  # mypy is not run where the peers are
    def setup(self, device: Any) -> None:  # noqa: ARG002  # the signature is litserve's
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = int(sys.argv[4])
        self.session = onnxruntime.InferenceSession(sys.argv[1], options, providers=["CPUExecutionProvider"])

    def decode_request(self, request) -> Any:  # type: ignore[no-untyped-def]  # a typed parameter would be read from the URL
        tensor = request["inputs"][0]
        kind = np.int64 if tensor["datatype"] == "INT64" else np.float32
        return np.array(tensor["data"], kind).reshape(tensor["shape"])[0]

    def batch(self, inputs: Any) -> Any:
        return np.stack(inputs)

    def predict(self, batch: Any) -> Any:
        return self.session.run(["logits"], {"x": batch})[0]

    def unbatch(self, output: Any) -> Any:
        return list(output)

    def encode_response(self, output: Any) -> Any:
        return {"outputs": [{"name": "logits", "data": output.tolist()}]}


if __name__ == "__main__":
    server = litserve.LitServer(Net(max_batch_size=32, batch_timeout=0.001), accelerator="cpu")
    server.run(host="127.0.0.1", port=int(sys.argv[2]), generate_client_file=False, log_level="error")
