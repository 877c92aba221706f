"""`python -m benchmarks.serve.raw_texts MODEL.onnx THREADS ROWS LENGTH TOKENS`: the bare runtime, one batch.

The plainest loop: one prompt of that length in each row, read in one run; then so many tokens, the likeliest each
time, with the cache bound where it lies.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnxruntime

from benchmarks.serve.decoder import first_inputs, names


def main(argv: Sequence[str]) -> None:
    model, (threads, rows, length, tokens) = argv[0], map(int, argv[1:])
    laps = []
    for spinning in "10":  # alone on the machine it gains, in company it costs
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.add_session_config_entry("session.intra_op.allow_spinning", spinning)
        session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        _lap(session, rows, 8, 2)
        laps.append(_lap(session, rows, length, tokens))
        del session
    print(json.dumps([min(values) for values in zip(*laps, strict=True)]))


def _lap(session: Any, rows: int, length: int, tokens: int) -> tuple[float, float, float]:
    """Return the seconds for the prompts and for the tokens after the first, and the CPU seconds of both."""
    ids = np.random.default_rng(1).integers(1, 8000, (rows, length))
    values = {name: onnxruntime.OrtValue.ortvalue_from_numpy(array) for name, array in first_inputs(ids).items()}
    started, cpu = time.perf_counter(), time.process_time()
    last, caches = _run(session, values)
    read_at = time.perf_counter()
    for position in range(length, length + tokens):
        arrays = (last, np.ones((rows, position + 1), np.int64), np.full((rows, 1), position, np.int64))
        inputs = zip(("input_ids", "attention_mask", "position_ids"), arrays, strict=True)
        last, caches = _run(
            session, {**{name: onnxruntime.OrtValue.ortvalue_from_numpy(array) for name, array in inputs}, **caches}
        )
    return read_at - started, time.perf_counter() - read_at, time.process_time() - cpu


def _run(session: Any, values: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    bound = session.io_binding()
    for name, value in values.items():
        bound.bind_ortvalue_input(name, value)
    bound.bind_output("logits", "cpu", 0)
    for _, present, _ in names():
        bound.bind_output(present, "cpu", 0)
    session.run_with_iobinding(bound)
    logits, *kept = bound.get_outputs()
    caches = {past: value for (past, _, _), value in zip(names(), kept, strict=True)}
    return logits.numpy()[:, -1].argmax(axis=1)[:, None], caches


if __name__ == "__main__":
    main(sys.argv[1:])
