from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from pipeline.system.errors import StageError
from pipeline.system.files import digest_bytes
from train.checkpoint.format import write_tensors
from train.state import LazyTensors, Progress, State

from .conftest import flip, names, save, state, store


@pytest.mark.parametrize("name", ["0.safetensors", "manifest.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "remove"])
def test_damaged_checkpoint_is_skipped_for_an_older_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, damage: str
) -> None:
    for number in (10, 20):
        save(tmp_path, number, fill=number)
    path = tmp_path / "step-00000020" / name
    raw = path.read_bytes()
    path.write_bytes({"flip": raw.replace(b"}", b"]", 1), "cut": raw[:40], "empty": b""}.get(damage, raw))
    if damage == "remove":
        path.unlink()
    saved = store(tmp_path).newest()
    assert saved is not None
    assert saved.progress.step == 10
    assert torch.equal(saved.tensors("weights.")["it"], torch.full((2, 2), 10.0))
    assert "warning: checkpoint step-00000020 is damaged" in capsys.readouterr().err


def test_flipped_bit_of_a_weight_is_damage(tmp_path: Path) -> None:
    save(tmp_path, 10)
    flip(tmp_path / "step-00000010" / "0.safetensors")
    with pytest.raises(StageError, match=r"step-00000010 is damaged: the digest of 0.safetensors does not match"):
        store(tmp_path).load(10)


def test_changed_step_in_the_manifest_is_damage(tmp_path: Path) -> None:
    save(tmp_path, 10)
    path = tmp_path / "step-00000010" / "manifest.json"
    path.write_text(path.read_text().replace('"step": 10', '"step": 90'))
    with pytest.raises(StageError, match="the digest of its manifest does not match"):
        store(tmp_path).load(10)


@pytest.mark.parametrize("name", ["0.safetensors", "manifest.json", ""])
@pytest.mark.parametrize("content", [b"", bytes(300), b"{", None])
def test_newest_checkpoint_is_kept_when_the_best_is_damaged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: bytes | None
) -> None:
    for number in (10, 20, 30):
        save(tmp_path, number, best=10, fill=number)
    path = tmp_path / "step-00000010" / (name or "0.safetensors")
    path.unlink() if content is None else path.write_bytes(content)
    if not name:
        shutil.rmtree(path.parent)
    saved = store(tmp_path).newest()
    assert saved is not None
    assert saved.progress == Progress(step=30, lost_best={"step": 10, "loss": 0.1})
    assert torch.equal(saved.tensors("weights.")["it"], torch.full((2, 2), 30.0))
    warning = capsys.readouterr().err
    assert "step-00000010 is damaged" in warning
    assert "it was the best so far, so the best one is chosen from step 30 on" in warning
    assert names(tmp_path) == ["step-00000010"] * bool(name) + ["step-00000020", "step-00000030"]


def test_checkpoint_of_a_newer_version_is_not_called_damaged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path, 10, best=10, fill=10)
    path = tmp_path / "step-00000010" / "manifest.json"
    text = json.dumps(json.loads(path.read_bytes())["content"] | {"shiny": 1}, sort_keys=True)
    path.write_text(f'{{"content": {text}, "sha256": "{digest_bytes(text.encode())}"}}')
    assert store(tmp_path).newest() is None
    assert "checkpoint step-00000010 is written by a newer version of pipe (" in capsys.readouterr().err


def test_lost_best_checkpoint_is_remembered(tmp_path: Path) -> None:
    progress = Progress(20, 20, 0.3, {"loss": 0.3}, lost_best={"step": 10, "loss": 0.1})
    for number in (20, 30):
        with store(tmp_path) as opened:
            opened.save(State(replace(progress, step=number), state(0).tensors))
    saved = store(tmp_path).newest()
    assert saved is not None
    assert saved.progress == replace(progress, step=30)
    flip(tmp_path / "step-00000020" / "0.safetensors")
    saved = store(tmp_path).newest()
    assert saved is not None
    assert saved.progress == Progress(30, lost_best={"step": 10, "loss": 0.1}), "the better one of the two"


def test_no_checkpoint_is_found_if_all_are_damaged(tmp_path: Path) -> None:
    save(tmp_path, 10)
    flip(tmp_path / "step-00000010" / "0.safetensors")
    assert store(tmp_path).newest() is None


def test_weights_are_written_to_one_file(tmp_path: Path) -> None:
    weights = {"scalar": torch.tensor(3.0), "mask": torch.tensor([True, False]), "half": torch.ones(3, 5).bfloat16()}
    tensors = {**{f"weights.{name}": tensor for name, tensor in weights.items()}, "optimizer.it": torch.ones(2)}
    with store(tmp_path / "checkpoints") as opened:
        opened.save(State(Progress(step=7), tensors))
    write_tensors(
        tmp_path / "model.safetensors", store(tmp_path / "checkpoints").load(7).tensors("weights."), {"step": "7"}
    )
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert file.metadata()["step"] == "7"
        written = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    torch.testing.assert_close(written, weights, rtol=0, atol=0)


def lazy(tensors: dict[str, Tensor]) -> LazyTensors:
    return LazyTensors({name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}, tensors.__getitem__)


def test_weights_can_be_read_by_all_users_and_are_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(os.fstat(handle).st_ino))
    path = tmp_path / "model.safetensors"
    write_tensors(path, lazy({"weight": torch.ones(2)}), {})
    assert path.stat().st_mode & 0o777 == 0o644
    assert synced == [path.stat().st_ino]


def test_views_and_transposed_tensors_are_written_whole(tmp_path: Path) -> None:
    matrix = torch.arange(9.0).reshape(3, 3)
    tensors = {"weight": matrix.T[:, :2], "bias": matrix[:, 1], "scalar": matrix[1, 1]}
    write_tensors(tmp_path / "it", lazy(tensors), {})
    torch.testing.assert_close(load_file(tmp_path / "it"), tensors, rtol=0, atol=0)
