from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from pipeline.spec.errors import StageError
from pipeline.spec.weights import load_weights, save_weights


class Tied(nn.Module):
    """Input and output share one matrix, as language models do."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight


def test_weights_come_back_bit_for_bit_in_evaluation_mode(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).train()
    save_weights(model.state_dict(), tmp_path / "w")
    found = load_weights(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), tmp_path / "w")
    assert not found.training
    for name, tensor in model.state_dict().items():
        assert torch.equal(found.state_dict()[name], tensor)


def test_tied_weights_are_written_and_stay_tied(tmp_path: Path) -> None:
    model = Tied()
    save_weights(model.state_dict(), tmp_path / "w")
    found = Tied()
    load_weights(found, tmp_path / "w")
    assert found.head.weight is found.embedding.weight
    assert torch.equal(found.head.weight, model.head.weight)


def test_views_and_transposed_tensors_are_written_whole(tmp_path: Path) -> None:
    matrix = torch.arange(6.0).reshape(2, 3)
    save_weights({"weight": matrix.T, "bias": matrix[:, 1]}, tmp_path / "w")
    layer = load_weights(nn.Linear(2, 3, bias=False), _only(tmp_path, "weight"))
    assert torch.equal(layer.get_parameter("weight"), matrix.T)


def _only(directory: Path, name: str) -> Path:
    from safetensors.torch import load_file

    save_weights({name: load_file(directory / "w")[name]}, directory / "one")
    return directory / "one"


@pytest.mark.parametrize("model", [nn.Linear(3, 5), nn.Linear(4, 4), nn.Linear(3, 4, bias=False), nn.Sequential()])
def test_weights_of_another_model_are_refused(tmp_path: Path, model: nn.Module) -> None:
    save_weights(nn.Linear(3, 4).state_dict(), tmp_path / "w")
    with pytest.raises(StageError, match="does not fit the task's model") as caught:
        load_weights(model, tmp_path / "w")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"\x80\x04pickle", None])
def test_a_file_that_is_missing_or_no_weights_is_refused(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "w").write_bytes(content)
    with pytest.raises(StageError, match="does not fit the task's model"):
        load_weights(nn.Linear(3, 4), tmp_path / "w")
