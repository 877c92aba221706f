"""Nets for a GPU, on random samples: GPT-2 of 124 million parameters, a DeepSeek-V3 that uses as many, ResNet-50."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import StackDataset

from benchmarks.train.transformer import Transformer
from benchmarks.train.workloads import Synthetic
from pipeline import linear_cross_entropy

if TYPE_CHECKING:
    from pipeline import Batch, Outputs
    from pipeline.contract.settings.stages import Train
    from pipeline.contract.task import Task


LENGTH = 1024
_VOCABULARY, _WIDTH, _HEADS, _DEPTH = 50304, 768, 12, 12
_DEEPSEEK = {
    "vocab_size": 32768,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "moe_intermediate_size": 512,
    "num_hidden_layers": 12,
    "first_k_dense_replace": 1,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "q_lora_rank": None,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "n_routed_experts": 32,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_mtp_layers": 0,
    "max_position_embeddings": LENGTH,
    "tie_word_embeddings": True,
    "use_cache": False,
}


class HiddenInTraining(Transformer):
    """Leaves the head to the loss in training, so that the logits of all tokens never exist."""

    def forward(self, x: Tensor) -> Tensor:
        return self.hidden(x) if self.training else super().forward(x)


class Gpt2(Synthetic):
    vocabulary = _VOCABULARY

    def model(self) -> nn.Module:
        self._model = HiddenInTraining(_VOCABULARY, _WIDTH, _HEADS, _DEPTH, LENGTH)
        return self._model

    def loss(self, outputs: Outputs, batch: Batch) -> Tensor:
        assert isinstance(outputs, Tensor)
        if not self._model.training:
            return super().loss(outputs, batch)
        return linear_cross_entropy(outputs, self._model.token.weight, batch["target"])

    def data(self, split: str) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(len(split))
        text = torch.randint(self.vocabulary, (1 << 14, LENGTH + 1), generator=generator)
        return {"x": text[:, :-1].contiguous(), "target": text[:, 1:].contiguous()}


class WholeLogits(Gpt2):
    """Computes the loss from the logits of all tokens."""

    def model(self) -> nn.Module:
        return Transformer(_VOCABULARY, _WIDTH, _HEADS, _DEPTH, LENGTH)

    def loss(self, outputs: Outputs, batch: Batch) -> Tensor:
        return Synthetic.loss(self, outputs, batch)


class ForeachAdamW(Gpt2):
    """Updates the weights with a kernel for each operation of AdamW, where train.optimizer has one for all."""

    def optimizer(self, model: nn.Module, settings: Train) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), settings.lr, settings.betas, settings.eps, foreach=True)


class DeepSeek(Gpt2):
    """With the experts' weights read in groups of tokens, as transformers do on a GPU."""

    vocabulary = _DEEPSEEK["vocab_size"] or 0
    size: dict[str, Any] = _DEEPSEEK

    def model(self) -> nn.Module:
        from transformers import DeepseekV3Config, DeepseekV3ForCausalLM  # here: GPT-2 needs it not

        model: nn.Module = DeepseekV3ForCausalLM(DeepseekV3Config(**self.size))
        return model

    def loss(self, outputs: Outputs, batch: Batch) -> Tensor:
        assert isinstance(outputs, Tensor)
        return functional.cross_entropy(outputs.flatten(0, -2).float(), batch["target"].flatten())


class ResNet(Synthetic):
    """ResNet-50 on pictures of 224 x 224 pixels; the data set has them in a quarter of the size, to fit into memory."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Upsample(scale_factor=4), *resnet(_STAGES, classes=1000))

    def data(self, split: str) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(len(split))
        pictures = torch.randn(256, 3, 56, 56, generator=generator).repeat(1 << 8, 1, 1, 1)
        return {"x": pictures, "target": torch.randint(1000, (len(pictures),), generator=generator)}


class ResNetFromHost(ResNet):
    """Loads picture by picture, so that batches come from the memory of the host."""

    def data(self, split: str) -> Any:
        return StackDataset(**super().data(split))  # type: ignore[arg-type]  # published for data sets alone


_STAGES = ((64, 3), (128, 4), (256, 6), (512, 3))  # width and blocks of each


def resnet(stages: Sequence[tuple[int, int]], classes: int) -> list[nn.Module]:
    """Return the layers of a residual net with bottleneck blocks."""
    channels = stages[0][0]
    layers = [*_convolution(3, channels, 7, stride=2), nn.ReLU(), nn.MaxPool2d(3, stride=2, padding=1)]
    for index, (width, blocks) in enumerate(stages):
        for block in range(blocks):
            layers.append(_Bottleneck(channels, width, stride=2 if index and not block else 1))
            channels = 4 * width
    return [*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)]


class _Bottleneck(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        narrow, middle = _convolution(inputs, width, 1), _convolution(width, width, 3, stride)
        self.path = nn.Sequential(*narrow, nn.ReLU(), *middle, nn.ReLU(), *_convolution(width, 4 * width, 1))
        changes = stride > 1 or inputs != 4 * width
        self.shortcut = nn.Sequential(*_convolution(inputs, 4 * width, 1, stride)) if changes else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.path(x) + self.shortcut(x))


def _convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False), nn.BatchNorm2d(outputs)]


def sequences(memory_bytes: int) -> int:
    """Return the batch size that fits on one GPU with the parameters and the logits of every token."""
    return next((count for count, gigabytes in ((32, 70), (16, 40), (8, 20)) if memory_bytes >= gigabytes << 30), 4)


def pictures(memory_bytes: int) -> int:
    """Return the batch size that fits on one GPU with ResNet-50."""
    return 128 if memory_bytes >= 40 << 30 else 32


@dataclass(frozen=True)
class Large:
    title: str
    make: Callable[[], Task]
    batch_size: Callable[[int], int] = sequences  # by the bytes of a GPU's memory
    unit: str = "tokens"
    units_per_sample: int = LENGTH


NETS = {
    "gpt2": Large("GPT-2 124M", Gpt2),
    "gpt2_whole_logits": Large("GPT-2 124M", WholeLogits),
    "gpt2_foreach": Large("GPT-2 124M", ForeachAdamW),
    "deepseek": Large("DeepSeek-V3, 12 layers, 4 of 32 experts", DeepSeek),
    "resnet": Large("ResNet-50", ResNet, pictures, "samples", 1),
    "resnet_from_host": Large("ResNet-50", ResNetFromHost, pictures, "samples", 1),
}
