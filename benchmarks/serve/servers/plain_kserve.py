"""kserve as its guide writes it: a Model whose predict runs the session."""

from __future__ import annotations

import sys
from typing import Any

if __name__ == "__main__":
    model_path, http_port, grpc_port, threads = sys.argv[1:5]
    sys.argv = [sys.argv[0], "--http_port", http_port, "--grpc_port", grpc_port]  # kserve reads it when imported

    import onnxruntime
    from kserve import InferOutput, InferRequest, InferResponse, Model, ModelServer

    class Net(Model):  # type: ignore[misc]  # kserve ships no types
        def load(self) -> bool:
            options = onnxruntime.SessionOptions()
            options.intra_op_num_threads = int(threads)
            self.session = onnxruntime.InferenceSession(model_path, options, providers=["CPUExecutionProvider"])
            self.ready = True
            return True

        def predict(self, payload: InferRequest, headers: Any = None, response_headers: Any = None) -> InferResponse:  # noqa: ARG002
            logits = self.session.run(["logits"], {"x": payload.inputs[0].as_numpy()})[0]
            output = InferOutput("logits", list(logits.shape), "FP32")
            output.set_data_from_numpy(logits, binary_data=payload.use_binary_outputs)
            return InferResponse(payload.id or "", self.name, [output])

    net = Net("net")
    net.load()
    ModelServer().start([net])
