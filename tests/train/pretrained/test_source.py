"""Damaged safetensors files are recognized by their header, before weights are read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pipeline.contract.pretrained import WEIGHT_FILE, open_pretrained
from pipeline.system.errors import DataError
from train.pretrained.load import match_weights
from train.pretrained.source import Entry, read_header

from .folders import Tower, tower_state, write_folder


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "some.safetensors"
    save_file({"a": torch.ones(3, 4), "b": torch.ones(2, dtype=torch.float8_e4m3fn)}, path, {"format": "pt"})
    return path


def write_header(path: Path, body: object) -> None:
    """Write another header before the same data."""
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"\0" * 50)


def refused(path: Path) -> str:
    with pytest.raises(DataError) as caught:
        read_header(path)
    assert str(caught.value).startswith(f"{path}: ")
    return str(caught.value)


def test_header_has_names_types_and_shapes(path: Path) -> None:
    assert read_header(path) == {"a": Entry(path, "a", "F32", (3, 4)), "b": Entry(path, "b", "F8_E4M3", (2,))}


def test_truncated_file_is_reported_with_its_expected_size(path: Path) -> None:
    whole = path.read_bytes()
    for length in (len(whole) - 1, len(whole) - 49):
        path.write_bytes(whole[:length])
        assert f"truncated: {len(whole)} bytes expected by its header, {length} found; fetch it again" in refused(path)
    path.write_bytes(whole[:30])
    assert "truncated: its header has" in refused(path)
    path.write_bytes(whole[:5])
    assert "no safetensors file: 5 bytes" in refused(path)
    path.write_bytes(whole + b"more")
    assert "too long" in refused(path)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{not json", "its header cannot be read"),
        ([], "its header cannot be read"),
        ({"a": {"dtype": "F32", "shape": [3, 4]}}, "its header cannot be read"),
        ({"a": {"dtype": "F32", "shape": 3, "data_offsets": [0, 48]}}, "its header cannot be read"),
        ({"a": {"dtype": "F4", "shape": [3], "data_offsets": [0, 50]}}, "a is of type F4; supported types: F64"),
        ({"a": {"dtype": "F32", "shape": [3, 4], "data_offsets": [0, 50]}}, r"a of F32 [3, 4] needs 48 bytes"),
    ],
)
def test_invalid_header_is_reported(path: Path, body: object, message: str) -> None:
    write_header(path, body)
    assert message in refused(path)


def test_html_page_instead_of_weights_is_reported(path: Path) -> None:
    path.write_text("<!DOCTYPE html><html><body>Sign in</body></html>")
    assert "no safetensors file" in refused(path)


def test_truncated_shard_is_named(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "tower", tower_state(), shards=2)
    shard = folder / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-8])
    with pytest.raises(DataError, match=r"model-00002-of-00002.safetensors: truncated: \d+ bytes expected"):
        match_weights(Tower, open_pretrained(folder), ())


def test_weight_in_two_shards_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "tower", tower_state(), shards=2)
    save_file(tower_state(), folder / "model-00001-of-00002.safetensors")
    with pytest.raises(DataError, match=r"is in model-00001-of-00002.safetensors, too"):
        match_weights(Tower, open_pretrained(folder), ())
    assert WEIGHT_FILE not in open_pretrained(folder).weights
