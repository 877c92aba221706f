from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from train.checkpoint.format import (
    LENGTH_BYTES,
    Chunk,
    DamagedCheckpoint,
    FileRecord,
    Manifest,
    decode_manifest,
    make_layout,
    parse_header,
)
from train.checkpoint.store import plan_shard
from train.state import Progress

WHOLE = Chunk("steps", torch.float32, (), (), ())
HALF = Chunk("weight", torch.bfloat16, (8, 3), (4, 0), (4, 3))
FLAGS = Chunk("flags", torch.bool, (3,), (0,), (3,))
COUNT = Chunk("count", torch.int64, (2,), (0,), (2,))
EMPTY = Chunk("nothing", torch.float32, (0,), (0,), (0,))


def test_layout_is_parsed_as_it_was_made_without_gaps() -> None:
    layout = make_layout([FLAGS, HALF, WHOLE, COUNT, EMPTY])
    assert parse_header(layout.header[LENGTH_BYTES:]) == list(layout.spans)
    position = len(layout.header)
    for span in layout.spans:
        assert span.start == position
        assert span.start % span.chunk.dtype.itemsize == 0
        position += span.chunk.bytes
    assert position == layout.bytes


def test_layout_may_be_empty() -> None:
    assert parse_header(make_layout([]).header[LENGTH_BYTES:]) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
def test_safetensors_loads_the_file(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {"a": torch.arange(6).reshape(2, 3).to(dtype), "b": torch.tensor(1.5), "c": torch.zeros(0)}
    (tmp_path / "it").write_bytes(plan_shard(tensors, None).copy(tensors))
    loaded = load_file(tmp_path / "it")
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(loaded[name], tensor)
        assert loaded[name].dtype == tensor.dtype


MANIFEST = Manifest(
    progress=Progress(7, 5, 0.1 + 0.2, {"loss": 0.1 + 0.2}, 2),
    scaler={"scale": 2.0},
    identity={"seed": 3},
    world_size=2,
    files=(FileRecord("0.safetensors", 100, "ab"), FileRecord("1.safetensors", 90, "cd")),
)


def test_manifest_survives_encoding() -> None:
    assert decode_manifest(MANIFEST.encode()) == MANIFEST


def test_manifest_is_readable_json() -> None:
    assert json.loads(MANIFEST.encode())["content"]["progress"]["step"] == 7


def test_any_changed_byte_of_the_manifest_is_detected() -> None:
    raw = MANIFEST.encode()
    for position in range(len(raw)):
        changed = bytearray(raw)
        changed[position] ^= 1
        try:
            loaded = decode_manifest(bytes(changed))
        except DamagedCheckpoint:
            continue
        assert loaded == MANIFEST, f"byte {position}, {raw[position : position + 1]!r}, decodes to something else"


@pytest.mark.parametrize("length", [0, 1, 30, -3])
def test_truncated_manifest_is_damaged(length: int) -> None:
    with pytest.raises(DamagedCheckpoint):
        decode_manifest(MANIFEST.encode()[:length])


def test_nan_is_never_written() -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        replace(MANIFEST, scaler={"scale": float("nan")}).encode()
