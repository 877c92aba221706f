from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pipeline.contract.errors import StageError

from .conftest import flip, save, store


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
    assert torch.equal(saved.read_all("weights.")["it"], torch.full((2, 2), 10.0))
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


def test_checkpoint_whose_best_one_is_damaged_is_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, best in ((5, 5), (10, 10), (20, 10)):
        save(tmp_path, number, best, keep=3)
    flip(tmp_path / "step-00000010" / "0.safetensors")
    saved = store(tmp_path).newest()
    assert saved is not None
    assert saved.progress.step == 5
    assert "step-00000010 is damaged" in capsys.readouterr().err


def test_no_checkpoint_is_found_if_all_are_damaged(tmp_path: Path) -> None:
    save(tmp_path, 10)
    flip(tmp_path / "step-00000010" / "0.safetensors")
    assert store(tmp_path).newest() is None
