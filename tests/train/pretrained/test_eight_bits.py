"""Official FP8 checkpoints: matrices of eight-bit numbers with a scale for each block."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from pipeline.contract.pretrained import WEIGHT_FILE, open_pretrained
from pipeline.system.errors import ConfigError, DataError
from train.pretrained.load import load_from_files
from train.pretrained.materialize import TensorReader
from train.pretrained.source import Dequantized

from .folders import BLOCK, EIGHT_BITS, Tower, quantize, tower_state, write_folder

QUANTIZATION = EIGHT_BITS["quantization_config"]


def dequantize(numbers: Tensor, scale: Tensor) -> Tensor:
    """Dequantize number by number, as the format is specified."""
    found = torch.empty(numbers.shape)
    for i in range(numbers.shape[0]):
        for j in range(numbers.shape[1]):
            found[i, j] = numbers[i, j].float() * scale[i // BLOCK[0], j // BLOCK[1]]
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    state: dict[str, Tensor] = {}
    for name, tensor in tower_state().items():
        if name.endswith("proj.weight"):
            state |= {name + more: part for more, part in quantize(tensor).items()}
        else:
            state[name] = tensor.bfloat16()
    return write_folder(tmp_path / "eight", state, config={"model_type": "llama", **EIGHT_BITS})


def load(folder: Path) -> nn.Module:
    pretrained = load_from_files(Tower, open_pretrained(folder), (), lambda: None)
    pretrained.materializer.materialize(pretrained.model, torch.device("cpu"))
    return pretrained.model


def test_blocks_are_multiplied_by_their_scales(folder: Path) -> None:
    stored, found, first = load_file(folder / WEIGHT_FILE), load(folder).state_dict(), tower_state()
    for name, tensor in found.items():
        if name.endswith("proj.weight"):
            assert torch.equal(tensor, dequantize(stored[name], stored[f"{name}_scale_inv"])), name
            torch.testing.assert_close(tensor, first[name], rtol=0.07, atol=1e-3)
        else:
            assert torch.equal(tensor, stored[name].float()), name


def test_only_numbers_and_scales_of_the_shard_are_read(folder: Path) -> None:
    pretrained = load_from_files(Tower, open_pretrained(folder), (), lambda: None)
    name = "layers.2.gate_proj.weight"
    source, read = pretrained.materializer._sources[name], TensorReader()
    assert isinstance(source, Dequantized)
    whole = load(folder).state_dict()[name]
    for rows in ((0, 16), (5, 13), (11, 12)):
        for columns in ((0, 8), (4, 6), (7, 8)):
            out = torch.empty(rows[1] - rows[0], columns[1] - columns[0])
            source.fill((rows, columns), out, read)
            assert torch.equal(out, whole[slice(*rows), slice(*columns)])
    read.bytes = 0
    source.fill(((6, 12), (0, 5)), torch.empty(6, 5), read)
    assert read.bytes == 6 * 5 + 4, "one block and one scale of four bytes"


def edit(folder: Path, **tensors: Tensor | None) -> None:
    state = load_file(folder / WEIGHT_FILE)
    for name, tensor in tensors.items():
        state.pop(name)
        if tensor is not None:
            state[name] = tensor
    save_file(state, folder / WEIGHT_FILE)


def test_missing_scale_is_refused(folder: Path) -> None:
    edit(folder, **{"layers.1.up_proj.weight_scale_inv": None})
    with pytest.raises(
        DataError, match=r"layers.1.up_proj.weight is of type F8_E4M3, but no file has its .*_scale_inv"
    ):
        load(folder)


def test_wrong_number_of_scales_is_refused(folder: Path) -> None:
    edit(folder, **{"layers.1.up_proj.weight_scale_inv": torch.ones(2, 2)})
    with pytest.raises(DataError, match=r"_scale_inv is \[2, 2\]; .* in blocks of \[6, 5\] needs scales of \[3, 2\]"):
        load(folder)


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({**QUANTIZATION, "quant_method": "gptq"}, r"quantized by 'gptq' .* use the weights in bf16"),
        ({**QUANTIZATION, "weight_block_size": None}, r"weight_block_size None"),
        ({**QUANTIZATION, "weight_block_size": [0, 5]}, r"must have positive numbers"),
    ],
)
def test_other_quantization_is_refused(folder: Path, quantization: object, message: str) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": quantization}))
    with pytest.raises(ConfigError, match=message):
        load(folder)


def test_eight_bits_without_quantization_config_are_refused(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "llama"}')
    with safe_open(folder / WEIGHT_FILE, "pt") as file:
        assert any(name.endswith("_scale_inv") for name in file.keys())  # noqa: SIM118 - no mapping
    with pytest.raises(DataError, match=r"config.json has no quantization_config"):
        load(folder)
