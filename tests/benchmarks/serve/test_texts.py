"""A short benchmark of a language model: every figure is a number."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from benchmarks.serve import decoder, raw_texts, texts


@pytest.mark.long
def test_service_is_compared_with_the_bare_runtime() -> None:
    size = texts.Size(rows=(2,), length=8, tokens=4, rounds=1)
    (row,) = texts.measure(size)
    assert row.rows == 2
    assert min(row.read_to_raw, row.written_to_raw, row.streamed_to_raw, row.cpu_to_raw) > 0


def test_reason_for_a_missing_peer_is_below_the_table() -> None:
    *table, empty, reason = texts.text([texts.Row(8, *[1.0] * 7)]).splitlines()
    assert [line[0] for line in table] == ["|"] * 3
    assert not empty
    assert "onnxruntime-genai" in reason


@pytest.mark.long
def test_plain_loop_equals_a_single_run_over_the_whole_text(tmp_path: Path) -> None:
    """Otherwise the service would be compared with different work."""
    path = decoder.bundle(tmp_path / "bundle", 1)
    session = onnxruntime.InferenceSession(str(path / "model.onnx"), providers=["CPUExecutionProvider"])
    ids = np.arange(5, 25).reshape(2, 10)
    values = {
        name: onnxruntime.OrtValue.ortvalue_from_numpy(array)
        for name, array in decoder.first_inputs(ids[:, :9]).items()
    }
    _, caches = raw_texts._run(session, values)
    step = {"input_ids": ids[:, 9:], "attention_mask": np.ones_like(ids), "position_ids": np.full((2, 1), 9)}
    bound = {
        name: onnxruntime.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array)) for name, array in step.items()
    }
    last, _ = raw_texts._run(session, {**bound, **caches})
    whole = session.run(["logits"], decoder.first_inputs(ids))[0]
    assert last[:, 0].tolist() == whole[:, -1].argmax(axis=1).tolist()
