"""Triton through pytriton, dynamic batching on."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import onnxruntime
from pytriton.decorators import batch
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig

if __name__ == "__main__":
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = int(sys.argv[4])
    session = onnxruntime.InferenceSession(sys.argv[1], options, providers=["CPUExecutionProvider"])
    found = session.get_inputs()[0]

    @batch  # type: ignore[untyped-decorator]
    def infer(x: Any) -> dict[str, Any]:
        return {"logits": session.run(["logits"], {"x": x})[0]}

    ports = {"http_port": int(sys.argv[2]), "grpc_port": int(sys.argv[3])}
    config = TritonConfig(http_address="127.0.0.1", grpc_address="127.0.0.1", allow_metrics=False, **ports)
    with Triton(config=config) as triton:
        triton.bind(
            model_name="net",
            infer_func=infer,
            inputs=[Tensor(name="x", dtype=np.int64 if "int64" in found.type else np.float32, shape=found.shape[1:])],
            outputs=[Tensor(name="logits", dtype=np.float32, shape=session.get_outputs()[0].shape[1:])],
            config=ModelConfig(max_batch_size=32, batcher=DynamicBatcher(max_queue_delay_microseconds=0)),
        )
        triton.serve()
