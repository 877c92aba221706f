"""The effect of each setting of a GPU; `python -m benchmarks.train --table gpu` measures what it is worth."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from benchmarks.train.large import HiddenInTraining, ResNet
from benchmarks.train.transformer import Transformer
from benchmarks.train.workloads import Convolution, Synthetic
from pipeline import linear_cross_entropy, log_probs_in_training, token_log_probs
from pipeline.contract.settings.stages import Train
from train.device.accelerator import configure_accelerator
from train.process_group import ProcessGroup
from train.trainer import Trainer

from .conftest import compiles, losses, make

pytestmark = pytest.mark.gpu

VOCABULARY, LENGTH, BATCH = 4096, 128, 8


class Text(Synthetic):
    """A language model whose activations and logits take more memory than its weights."""

    in_chunks = False

    def model(self) -> nn.Module:
        kind = HiddenInTraining if self.in_chunks else Transformer
        self.net = kind(VOCABULARY, width=128, heads=2, depth=4, length=LENGTH)
        return self.net

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        if self.in_chunks and self.net.training:
            return linear_cross_entropy(outputs, self.net.token.weight, batch["target"], chunk=128)
        return super().loss(outputs, batch)

    def data(self, split: str) -> dict[str, Tensor]:
        text = torch.randint(VOCABULARY, (64, LENGTH + 1), generator=torch.Generator().manual_seed(len(split)))
        return {"x": text[:, :-1].contiguous(), "target": text[:, 1:].contiguous()}


class ChunkedText(Text):
    in_chunks = True


class ForeachText(Text):
    """Updates weights without the fused kernel."""

    def optimizer(self, model: nn.Module, settings: Train) -> torch.optim.Optimizer:
        decayed = [parameter for parameter in model.parameters() if parameter.ndim > 1]
        others = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
        groups = [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": others, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps, foreach=True)


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    cudnn: Any = torch.backends.cudnn  # published without all of its types
    before = cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision, cudnn.benchmark
    products = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(products)
    cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision, cudnn.benchmark = before
    for kernel in ("flash", "mem_efficient", "math", "cudnn"):
        getattr(torch.backends.cuda, f"enable_{kernel}_sdp")(True)


def text_trainer(group: ProcessGroup, task: type[Synthetic] = Text, **train: Any) -> Trainer:
    return make(group, task(), **{"batch_size": BATCH, "deterministic": False, **train})  # flash attention warns


def peak_bytes(trainer: Trainer, steps: int = 2) -> int:
    """Return the peak of what steps allocate beyond weights and optimizer state."""
    losses(trainer, range(1))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    losses(trainer, range(1, 1 + steps))
    return torch.cuda.max_memory_allocated() - before


def operators(function: Callable[[], object], device: torch.device) -> set[str]:
    """Return the names of what a function runs: operators of torch, and kernels of the GPU."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with profile(activities=activities, acc_events=True) as profiler:
        function()
    return {event.key for event in profiler.key_averages()}


def test_tf32_changes_the_bits_of_products_and_convolutions(group: ProcessGroup) -> None:
    if torch.cuda.get_device_capability(group.device) < (8, 0):
        pytest.skip("no TF32 before Ampere")
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(512, 512, generator=generator).to(group.device) for _ in range(2))
    pictures, filters = (torch.randn(8, 64, side, side, generator=generator).to(group.device) for side in (16, 3))
    exact = left.double() @ right.double(), nn.functional.conv2d(pictures.double(), filters.double())
    errors: dict[str, list[float]] = {}
    for precision in ("highest", "high"):
        settings = {"matmul_precision": precision, "device": "cuda"}
        configure_accelerator(Train.model_validate(settings), group.device)
        found = left @ right, nn.functional.conv2d(pictures, filters)
        errors[precision] = [((a - b).norm() / b.norm()).item() for a, b in zip(found, exact, strict=True)]
    print(f"relative errors of a product and a convolution: {errors}")
    assert max(errors["highest"]) < 1e-4
    assert 1e-4 < errors["high"][0] < 1e-2
    assert errors["high"][1] < 1e-2


def test_bf16_needs_less_memory_and_follows_fp32(group: ProcessGroup) -> None:
    trainers = {precision: text_trainer(group, precision=precision) for precision in ("fp32", "bf16")}
    bytes_ = {precision: peak_bytes(trainer) for precision, trainer in trainers.items()}
    found = {precision: losses(trainer, range(3, 8)) for precision, trainer in trainers.items()}
    print(f"bytes {bytes_}, losses {found}")
    assert bytes_["bf16"] < bytes_["fp32"]
    assert found["bf16"] == pytest.approx(found["fp32"], rel=0.02)


def test_fused_optimizer_gives_the_updates_of_the_foreach_one(group: ProcessGroup) -> None:
    fused, parts = text_trainer(group), text_trainer(group, ForeachText)
    assert losses(fused, range(6)) == pytest.approx(losses(parts, range(6)), rel=1e-3)
    names = [operators(partial(losses, made, range(6, 7)), group.device) for made in (fused, parts)]
    assert ["aten::_fused_adamw_" in own for own in names] == [True, False]


@compiles
@pytest.mark.parametrize("how", [True, "blocks"])
def test_compiled_text_follows_eager(group: ProcessGroup, how: object) -> None:
    eager, compiled = losses(text_trainer(group), range(5)), losses(text_trainer(group, compile=how), range(5))
    print(f"eager {eager}, compiled {compiled}")
    assert compiled == pytest.approx(eager, rel=1e-3)


def test_trainings_with_attention_have_the_same_bits(group: ProcessGroup) -> None:
    found = [losses(text_trainer(group, precision="bf16", deterministic=True), range(8)) for _ in range(2)]
    print(f"losses {found}")
    assert found[0] == found[1]


def test_the_loss_in_chunks_needs_less_memory(group: ProcessGroup) -> None:
    whole, chunked = text_trainer(group), text_trainer(group, ChunkedText)
    assert losses(chunked, range(3)) == pytest.approx(losses(whole, range(3)), rel=1e-4)
    bytes_ = {name: peak_bytes(made) for name, made in (("whole", whole), ("chunked", chunked))}
    logits = 4 * BATCH * LENGTH * VOCABULARY
    print(f"bytes {bytes_}, of all logits {logits}")
    assert bytes_["chunked"] < bytes_["whole"] - logits


class Scored(Text):
    """A model of transformers, with logits or log-probabilities in training."""

    inputs, outputs, in_chunks = ("input_ids",), ("logits",), True

    def model(self) -> nn.Module:
        from transformers import Qwen2Config, Qwen2ForCausalLM

        sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2}
        model = Qwen2ForCausalLM(Qwen2Config(vocab_size=VOCABULARY, num_key_value_heads=2, use_cache=False, **sizes))
        scored: nn.Module = log_probs_in_training(model, chunk=128) if self.in_chunks else model
        return scored

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        return -token_log_probs(outputs, batch["input_ids"]).mean()

    def data(self, split: str) -> dict[str, Tensor]:
        return {"input_ids": super().data(split)["x"]}


class ScoredFromLogits(Scored):
    in_chunks = False


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_log_probabilities_in_chunks_need_less_memory(group: ProcessGroup, precision: str) -> None:
    whole, chunked = (text_trainer(group, task, precision=precision) for task in (ScoredFromLogits, Scored))
    found, expected = losses(chunked, range(3)), losses(whole, range(3))
    bytes_ = {name: peak_bytes(made) for name, made in (("whole", whole), ("chunked", chunked))}
    print(f"losses {found}, from logits {expected}, bytes {bytes_}")
    assert found == pytest.approx(expected, rel=1e-4 if precision == "fp32" else 0.02)
    assert bytes_["chunked"] < bytes_["whole"] - 4 * BATCH * LENGTH * VOCABULARY


def test_recomputed_blocks_need_less_memory(group: ProcessGroup) -> None:
    kept, recomputed = text_trainer(group, ChunkedText), text_trainer(group, ChunkedText, recompute="blocks")
    assert losses(recomputed, range(3)) == pytest.approx(losses(kept, range(3)), rel=1e-5)
    bytes_ = {name: peak_bytes(made) for name, made in (("kept", kept), ("recomputed", recomputed))}
    print(f"bytes {bytes_}")
    assert bytes_["recomputed"] < bytes_["kept"]


class Pictures(Convolution):
    def data(self, split: str) -> dict[str, Tensor]:
        return {name: column[:64] for name, column in super().data(split).items()}


def test_channels_last_arrives_in_every_convolution(group: ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make(group, Pictures(), batch_size=BATCH)
    formats = []

    def record(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        formats.append(inputs[0].is_contiguous(memory_format=torch.channels_last))

    for module in trainer.strategy.model.modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_pre_hook(record)
    found = losses(trainer, range(3))
    monkeypatch.setattr("train.trainer.choose_input_formats", lambda *_, **__: {})
    expected = losses(make(group, Pictures(), batch_size=BATCH), range(3))
    print(f"losses {found}, in the other format {expected}")
    assert formats == [True] * 3 * 6  # steps and convolutions
    assert found == pytest.approx(expected, rel=1e-2)


def test_cudnn_tries_its_algorithms_unless_deterministic(group: ProcessGroup) -> None:
    found = {}
    for deterministic in (True, False):
        torch.use_deterministic_algorithms(False)
        trainer = make(group, Pictures(), batch_size=BATCH, deterministic=deterministic)
        assert torch.backends.cudnn.benchmark is not deterministic
        found[deterministic] = losses(trainer, range(3))
    print(f"losses by deterministic: {found}")
    assert found[True] == pytest.approx(found[False], rel=1e-2)


def test_the_utilization_is_a_share(group: ProcessGroup) -> None:
    trainer = text_trainer(group, precision="bf16")
    if trainer.flops is None:
        pytest.skip(f"the peak of {torch.cuda.get_device_name(group.device)} is not known")
    losses(trainer, range(3))
    torch.cuda.synchronize()
    started = time.perf_counter()
    losses(trainer, range(3, 8))  # it reads the losses, which waits for the GPU
    utilization = trainer.flops.utilization(5 * BATCH / (time.perf_counter() - started))
    print(f"model FLOPs utilization {utilization:.2%}")
    assert 0 < utilization < 1


class FewPictures(ResNet):
    def data(self, split: str) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(len(split))
        pictures = torch.randn(16, 3, 56, 56, generator=generator)
        return {"x": pictures, "target": torch.randint(1000, (16,), generator=generator)}


def test_resnet_50_of_the_benchmark_learns(group: ProcessGroup) -> None:
    trainer = make(group, FewPictures(), batch_size=BATCH, precision="bf16", deterministic=False, epochs=40, lr=1e-3)
    found = losses(trainer, range(60))
    print(f"losses {found[0]:.3f} … {found[-1]:.3f}")
    assert found[-1] < found[0] / 2
