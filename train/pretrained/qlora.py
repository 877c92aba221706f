"""QLoRA: the frozen weights below the adapters in 4 bits (NF4), by bitsandbytes.

Training, checkpoints and memory have the rounded weights. The adapter has learned to go with them, so after training it
is merged into what they stand for, and not into the official weights.

T. Dettmers et al., "QLoRA: Efficient Finetuning of Quantized LLMs", NeurIPS 2023.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pipeline.system.errors import ResourceError
from train.pretrained.materialize import Materializer
from train.state import LazyTensors

_BLOCK = 64  # weights with a common scale
_SCALES = ".absmax"


def require_bitsandbytes() -> None:
    try:
        import bitsandbytes  # noqa: F401
    except ImportError:
        raise ResourceError(
            "model.adapter=qlora: `bitsandbytes` is not installed; to fix it: `pip install pipe-road[qlora]`"
        ) from None


class FourBitLinear(nn.Module):
    """A frozen linear layer whose weights are rounded to 4 bits."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        from bitsandbytes.functional import quantize_4bit

        self.in_features, self.out_features = layer.in_features, layer.out_features
        packed, state = quantize_4bit(layer.weight.detach(), blocksize=_BLOCK, quant_type="nf4")
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.absmax = nn.Parameter(state.absmax, requires_grad=False)
        self.bias = layer.bias
        self._type, self._code = state.dtype, state.code

    def forward(self, x: Tensor) -> Tensor:
        from bitsandbytes import matmul_4bit

        result: Tensor = matmul_4bit(x, self.weight.t(), self._state(), bias=self.bias)
        return result

    def _state(self) -> Any:
        from bitsandbytes.functional import QuantState

        self._code = self._code.to(self.weight.device)
        shape = torch.Size((self.out_features, self.in_features))
        return QuantState(self.absmax, shape, self._code, _BLOCK, "nf4", self._type)


def round_base_layers(model: nn.Module, materializer: Materializer | None, device: torch.device) -> None:
    """Read and round the layers below the adapters, one after the other: no two have whole weights at a time."""
    for name, adapter in adapter_layers(model):
        layer = adapter.base_layer
        if materializer:
            materializer.materialize(layer, device, f"{name}.base_layer.")
        adapter.base_layer = FourBitLinear(layer.to(device))


def whole_weights(weights: LazyTensors, model: nn.Module) -> LazyTensors:
    """Return the weights of a checkpoint with rounded ones as numbers; `model` has the whole layers."""
    from bitsandbytes.functional import QuantState, dequantize_4bit, get_4bit_type

    scales = {f"{name.removesuffix(_SCALES)}.weight": name for name in weights if name.endswith(_SCALES)}
    shapes = {name: shape for name, shape in weights.shapes.items() if not name.endswith(_SCALES)}
    for name in scales:
        shapes[name] = model.get_parameter(name).shape, model.get_parameter(name).dtype

    def read(name: str) -> Tensor:
        if name not in scales:
            return weights[name]
        code = get_4bit_type("nf4", device="cpu", blocksize=_BLOCK)
        shape, dtype = shapes[name]
        state = QuantState(weights[scales[name]], shape, code, _BLOCK, "nf4", dtype)
        whole: Tensor = dequantize_4bit(weights[name], state)
        return whole

    return LazyTensors(shapes, read)


def adapter_layers(model: nn.Module) -> list[tuple[str, Any]]:
    from peft.tuners.tuners_utils import BaseTunerLayer

    return [(name, module) for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)]
