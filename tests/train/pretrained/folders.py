"""Small folders of weights, laid out as on the hub."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from pipeline.contract.pretrained import WEIGHT_FILE, WEIGHT_INDEX

BLOCK = (6, 5)  # no side of a matrix is a multiple of both
EIGHT_BITS: dict[str, Any] = {
    "quantization_config": {
        "quant_method": "fp8",
        "weight_block_size": list(BLOCK),
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
    }
}


class Mlp(nn.Module):
    """With names that tensor parallelism recognizes."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(8, 16), nn.Linear(8, 16)
        self.down_proj = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down_proj(torch.tanh(self.gate_proj(x)) * self.up_proj(x))
        return x + output


class Tower(nn.Module):
    """Repeated blocks between two layers, a buffer that is saved and one that is not; needs no transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 8)
        self.layers = nn.ModuleList(Mlp() for _ in range(4))
        self.head = nn.Linear(8, 1)
        self.offset = nn.Parameter(torch.zeros(8))  # outside all layers
        self.register_buffer("shift", torch.zeros(8))
        self.register_buffer("scale", torch.full((8,), 0.5), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) * self.scale + self.shift + self.offset
        for layer in self.layers:
            x = layer(x)
        output: Tensor = self.head(x)
        return output


def tower_state() -> dict[str, Tensor]:
    torch.manual_seed(7)
    state = Tower().state_dict()
    state |= {"shift": torch.linspace(-1, 1, 8), "offset": torch.linspace(0, 0.5, 8)}
    return state


def write_folder(
    folder: Path, state: Mapping[str, Tensor], shards: int = 1, config: Mapping[str, Any] | None = None
) -> Path:
    """Write a folder as on the hub; weights go into the shards in turn."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config or {"model_type": "llama"}))
    if shards == 1:
        save_file({name: tensor.contiguous() for name, tensor in state.items()}, folder / WEIGHT_FILE)
        return folder
    names = [f"model-{number + 1:05d}-of-{shards:05d}.safetensors" for number in range(shards)]
    parts: list[dict[str, Tensor]] = [{} for _ in names]
    for position, (name, tensor) in enumerate(state.items()):
        parts[position % shards][name] = tensor.contiguous()
    for name, part in zip(names, parts, strict=True):
        save_file(part, folder / name)
    weight_map = {weight: name for name, part in zip(names, parts, strict=True) for weight in part}
    (folder / WEIGHT_INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def quantize(weight: Tensor) -> dict[str, Tensor]:
    """Quantize as official checkpoints: each block is scaled so that its largest number is that of the type."""
    rows, columns = (-(-size // side) for size, side in zip(weight.shape, BLOCK, strict=True))
    scale, numbers = torch.empty(rows, columns), torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    for row in range(rows):
        for column in range(columns):
            position = _block(row, column)
            scale[row, column] = weight[position].abs().max() / 448
            numbers[position] = (weight[position] / scale[row, column]).to(torch.float8_e4m3fn)
    return {"": numbers, "_scale_inv": scale}


def _block(row: int, column: int) -> tuple[slice, slice]:
    return slice(row * BLOCK[0], (row + 1) * BLOCK[0]), slice(column * BLOCK[1], (column + 1) * BLOCK[1])
