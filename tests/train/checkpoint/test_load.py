from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pipeline.contract.errors import StageError

from .conftest import flip, save, store


@pytest.mark.parametrize("name", ["0.safetensors", "manifest.json"])
@pytest.mark.parametrize("harm", ["flip", "cut", "empty", "remove"])
def test_a_damaged_one_is_passed_over_aloud_for_the_newest_that_is_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, harm: str
) -> None:
    for number in (10, 20):
        save(tmp_path, number, fill=number)
    path = tmp_path / "step-00000020" / name
    raw = path.read_bytes()
    path.write_bytes({"flip": raw.replace(b"}", b"]", 1), "cut": raw[:40], "empty": b""}.get(harm, raw))
    if harm == "remove":
        path.unlink()
    found = store(tmp_path).newest()
    assert found is not None
    assert found.progress.step == 10
    assert torch.equal(found.whole("weights.")["it"], torch.full((2, 2), 10.0))
    assert "warning: checkpoint step-00000020 is damaged" in capsys.readouterr().err


def test_one_flipped_bit_of_a_weight_is_damage(tmp_path: Path) -> None:
    save(tmp_path, 10)
    flip(tmp_path / "step-00000010" / "0.safetensors")
    with pytest.raises(StageError, match=r"step-00000010 is damaged: the digest of 0.safetensors does not match"):
        store(tmp_path).load(10)


def test_a_manifest_that_tells_of_another_step_is_damage(tmp_path: Path) -> None:
    save(tmp_path, 10)
    path = tmp_path / "step-00000010" / "manifest.json"
    path.write_text(path.read_text().replace('"step": 10', '"step": 90'))
    with pytest.raises(StageError, match="the digest of its manifest does not match"):
        store(tmp_path).load(10)


def test_one_whose_best_is_damaged_is_passed_over_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, best in ((5, 5), (10, 10), (20, 10)):
        save(tmp_path, number, best, keep=3)
    flip(tmp_path / "step-00000010" / "0.safetensors")
    found = store(tmp_path).newest()
    assert found is not None
    assert found.progress.step == 5
    assert "step-00000010 is damaged" in capsys.readouterr().err


def test_when_all_are_damaged_training_starts_anew(tmp_path: Path) -> None:
    save(tmp_path, 10)
    flip(tmp_path / "step-00000010" / "0.safetensors")
    assert store(tmp_path).newest() is None
