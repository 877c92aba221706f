from __future__ import annotations

from typing import Any

import pytest
import torch

from pipeline.system.processes import Rank
from train.device.flops import ModelFlops, count_flops, grouped_mm_flops, measure_flops, peak_flops
from train.metrics import StepMeter
from train.parallel.blocks import recompute_blocks
from train.process_group import ProcessGroup
from train.trainer import Trainer

from ..distributed import run_distributed, trainer, weights

CPU = ProcessGroup(Rank(), torch.device("cpu"))
# Two layers and a head, 2 per weight and pass; the first layer needs no gradient of its input.
LAYERS = (3 * 32, 32 * 16, 16 * 1)
PER_SAMPLE = 6 * sum(LAYERS) - 2 * LAYERS[0]


def batch(made: Trainer) -> Any:
    return next(iter(made._micro_batches(0))).columns


def test_peak_flops_follow_from_gpu_name_and_precision() -> None:
    assert peak_flops("NVIDIA H200", "bf16", "high") == 989e12
    assert peak_flops("NVIDIA H100 PCIe", "fp16", "high") == 756e12
    assert peak_flops("NVIDIA A100-SXM4-80GB", "fp32", "high") == 156e12
    assert peak_flops("NVIDIA A100-SXM4-80GB", "fp32", "highest") == 19.5e12
    assert peak_flops("Some Other Card", "bf16", "high") is None
    assert peak_flops("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bf16", "high") is None


def test_flops_of_a_pass_are_counted_without_side_effects() -> None:
    made = trainer(CPU)
    before = weights(made)
    assert count_flops(made.strategy, batch(made)) == PER_SAMPLE
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(made).items())
    assert all(parameter.grad is None for parameter in made.strategy.model.parameters())


def test_recomputed_operations_are_not_counted() -> None:
    made = trainer(CPU)
    recompute_blocks(made.strategy.model)
    recomputed = {name: block.forward for name, block in made.strategy.model.named_modules()}
    assert count_flops(made.strategy, batch(made)) == PER_SAMPLE
    assert {name: block.forward for name, block in made.strategy.model.named_modules()} == recomputed


def per_sample(group: ProcessGroup, strategy: str) -> float:
    made = trainer(group, strategy=strategy)
    return count_flops(made.strategy, batch(made))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "local_sgd"])
def test_flops_per_sample_are_the_same_with_several_processes(strategy: str) -> None:
    assert run_distributed(per_sample, 2, strategy) == [PER_SAMPLE] * 2


class TwoGpus(ProcessGroup):
    """This process and another one with the same kind of GPU."""

    def gather(self, value: Any) -> list[Any]:
        return [value, value]


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> TwoGpus:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    return TwoGpus(Rank(), torch.device("cuda", 0))


def test_the_utilization_of_known_gpus_is_measured(gpus: TwoGpus, monkeypatch: pytest.MonkeyPatch) -> None:
    made = trainer(CPU, matmul_precision="highest")
    assert measure_flops(made.strategy, made.config, lambda: made._micro_batches(0)) is None, "not on a CPU"
    monkeypatch.setattr(made.strategy, "group", gpus)
    measured = measure_flops(made.strategy, made.config, lambda: made._micro_batches(0))
    assert measured == ModelFlops(PER_SAMPLE, 2 * 67e12)
    assert measured.utilization(1e9) == pytest.approx(1e9 * PER_SAMPLE / 134e12)
    split = made.config.model_copy(update={"tensor_parallel": 2})
    assert measure_flops(made.strategy, split, lambda: made._micro_batches(0)) is None
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some Other Card")
    assert measure_flops(made.strategy, made.config, lambda: made._micro_batches(0)) is None


def test_a_line_of_the_log_has_the_utilization() -> None:
    made = trainer(CPU)
    made._meter = StepMeter(made.strategy, made._loader, made._precision, CPU, ModelFlops(100.0, 1e4))
    made._step(0)
    values = made._meter.measure(made._window).values
    assert values["mfu"] == pytest.approx(values["samples_per_second"] / 100)


def test_products_of_experts_are_counted_by_their_groups() -> None:
    tokens, experts, width, out = 10, 4, 6, 8
    expected = 2 * tokens * width * out
    assert grouped_mm_flops((tokens, width), (experts, width, out)) == expected
    assert grouped_mm_flops((width, tokens), (tokens, out)) == expected, "the gradient of the weights"
    assert grouped_mm_flops((experts, out, width), (width, tokens)) == expected
