"""Official FP8 checkpoints: a matrix of eight-bit numbers, a scale for each block of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from pipeline.contract.errors import ConfigError, DataError
from pipeline.contract.pretrained import SINGLE, open_pretrained
from train.pretrained.fill import Reading
from train.pretrained.load import from_files
from train.pretrained.source import Scaled

from .folders import BLOCK, EIGHT_BITS, Tower, quantised, tower_state, write_folder

SAID = EIGHT_BITS["quantization_config"]


def straight(numbers: Tensor, scale: Tensor) -> Tensor:
    """Number by number, as the format's description has it."""
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
            state |= {name + more: part for more, part in quantised(tensor).items()}
        else:
            state[name] = tensor.bfloat16()
    return write_folder(tmp_path / "eight", state, config={"model_type": "llama", **EIGHT_BITS})


def filled(folder: Path) -> nn.Module:
    begun = from_files(Tower, open_pretrained(folder), (), lambda: None)
    begun.filling.fill(begun.model, torch.device("cpu"))
    return begun.model


def test_blocks_are_multiplied_by_their_scales_as_the_model_is_filled(folder: Path) -> None:
    stored, found, first = load_file(folder / SINGLE), filled(folder).state_dict(), tower_state()
    for name, tensor in found.items():
        if name.endswith("proj.weight"):
            assert torch.equal(tensor, straight(stored[name], stored[f"{name}_scale_inv"])), name
            torch.testing.assert_close(tensor, first[name], rtol=0.07, atol=1e-3)
        else:
            assert torch.equal(tensor, stored[name].float()), name


def test_of_a_part_only_its_own_numbers_and_scales_are_read(folder: Path) -> None:
    begun = from_files(Tower, open_pretrained(folder), (), lambda: None)
    name = "layers.2.gate_proj.weight"
    source, read = begun.filling._sources[name], Reading()
    assert isinstance(source, Scaled)
    whole = filled(folder).state_dict()[name]
    for rows in ((0, 16), (5, 13), (11, 12)):
        for columns in ((0, 8), (4, 6), (7, 8)):
            out = torch.empty(rows[1] - rows[0], columns[1] - columns[0])
            source.fill((rows, columns), out, read)
            assert torch.equal(out, whole[slice(*rows), slice(*columns)])
    read.bytes = 0
    source.fill(((6, 12), (0, 5)), torch.empty(6, 5), read)
    assert read.bytes == 6 * 5 + 4, "one block and one scale of four bytes"


def edit(folder: Path, **tensors: Tensor | None) -> None:
    state = load_file(folder / SINGLE)
    for name, tensor in tensors.items():
        state.pop(name)
        if tensor is not None:
            state[name] = tensor
    save_file(state, folder / SINGLE)


def test_numbers_without_a_scale_are_refused_by_name(folder: Path) -> None:
    edit(folder, **{"layers.1.up_proj.weight_scale_inv": None})
    with pytest.raises(DataError, match=r"layers.1.up_proj.weight is of type F8_E4M3 and no file has its .*_scale_inv"):
        filled(folder)


def test_scales_of_another_number_of_blocks_are_refused(folder: Path) -> None:
    edit(folder, **{"layers.1.up_proj.weight_scale_inv": torch.ones(2, 2)})
    with pytest.raises(DataError, match=r"_scale_inv is \[2, 2\]; .* in blocks of \[6, 5\] has scales of \[3, 2\]"):
        filled(folder)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({**SAID, "quant_method": "gptq"}, r"quantised by 'gptq' .* take the weights in bf16"),
        ({**SAID, "weight_block_size": None}, r"weight_block_size None"),
        ({**SAID, "weight_block_size": [0, 5]}, r"must be of numbers above zero"),
    ],
)
def test_other_kinds_of_eight_bits_are_refused(folder: Path, said: object, message: str) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": said}))
    with pytest.raises(ConfigError, match=message):
        filled(folder)


def test_eight_bits_that_the_config_does_not_tell_of_are_refused(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "llama"}')
    with safe_open(folder / SINGLE, "pt") as file:
        assert any(name.endswith("_scale_inv") for name in file.keys())  # noqa: SIM118 - no mapping
    with pytest.raises(DataError, match=r"config.json has no quantization_config"):
        filled(folder)
