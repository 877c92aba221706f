from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from train.checkpoint.format import LENGTH_BYTES, Chunk, Damaged, Manifest, Written, decode, lay_out, read_layout
from train.checkpoint.sharding import share_out
from train.state import Progress

WHOLE = Chunk("steps", torch.float32, (), (), ())
PART = Chunk("weight", torch.bfloat16, (8, 3), (4, 0), (4, 3))
FLAGS = Chunk("flags", torch.bool, (3,), (0,), (3,))
COUNT = Chunk("count", torch.int64, (2,), (0,), (2,))
NOTHING = Chunk("nothing", torch.float32, (0,), (0,), (0,))


def test_a_layout_is_read_as_it_was_written_and_its_chunks_stand_one_behind_the_other() -> None:
    layout = lay_out([FLAGS, PART, WHOLE, COUNT, NOTHING])
    assert read_layout(layout.header[LENGTH_BYTES:]) == list(layout.spans)
    place = len(layout.header)
    for span in layout.spans:
        assert span.start == place
        assert span.start % span.chunk.dtype.itemsize == 0
        place += span.chunk.bytes
    assert place == layout.bytes


def test_nothing_to_write_is_a_file_too() -> None:
    assert read_layout(lay_out([]).header[LENGTH_BYTES:]) == []


@pytest.mark.parametrize("kind", [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
def test_others_read_it_as_a_safetensors_file(tmp_path: Path, kind: torch.dtype) -> None:
    tensors = {"a": torch.arange(6).reshape(2, 3).to(kind), "b": torch.tensor(1.5), "c": torch.zeros(0)}
    (tmp_path / "it").write_bytes(share_out(tensors, None).take(tensors))
    found = load_file(tmp_path / "it")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(found[name], tensor)
        assert found[name].dtype == tensor.dtype


MANIFEST = Manifest(
    progress=Progress(7, 5, 0.1 + 0.2, {"loss": 0.1 + 0.2}, 2),
    scaler={"scale": 2.0},
    identity={"seed": 3},
    world_size=2,
    files=(Written("0.safetensors", 100, "ab"), Written("1.safetensors", 90, "cd")),
)


def test_what_is_read_is_what_was_written() -> None:
    assert decode(MANIFEST.encode()) == MANIFEST


def test_a_person_can_read_it() -> None:
    assert json.loads(MANIFEST.encode())["content"]["progress"]["step"] == 7


def test_any_byte_that_is_another_one_is_found() -> None:
    raw = MANIFEST.encode()
    for place in range(len(raw)):
        changed = bytearray(raw)
        changed[place] ^= 1
        try:
            found = decode(bytes(changed))
        except Damaged:
            continue
        assert found == MANIFEST, f"byte {place}, {raw[place : place + 1]!r}, says something else"


@pytest.mark.parametrize("length", [0, 1, 30, -3])
def test_a_part_of_it_is_damage(length: int) -> None:
    with pytest.raises(Damaged):
        decode(MANIFEST.encode()[:length])


def test_a_number_that_is_none_is_never_written() -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        replace(MANIFEST, scaler={"scale": float("nan")}).encode()
