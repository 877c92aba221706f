from __future__ import annotations

import json
from dataclasses import replace

import pytest

from train.checkpoint.manifest import Damaged, Manifest, Written, decode
from train.state import Progress

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
