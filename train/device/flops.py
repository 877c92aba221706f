"""Model FLOPs utilization (MFU): the floating point operations of training, compared with the peak of the GPUs.

The operations are counted once before training. What activation checkpointing computes again is not among them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from pipeline.contract.settings.stages import Train
from pipeline.system.torch_private import grouped_mm
from train.device.accelerator import Kind
from train.parallel.base import MicroBatch, Strategy
from train.parallel.blocks import without_recomputation
from train.state import restored_buffers


class Peak(NamedTuple):
    """Dense TFLOP/s of a GPU, from its maker's data sheet."""

    half: float  # bf16 and fp16
    tf32: float
    fp32: float


PEAKS = {
    "A10": Peak(125, 62.5, 31.2),
    "A100": Peak(312, 156, 19.5),
    "H100": Peak(989, 495, 67),
    "H100 NVL": Peak(835, 418, 60),
    "H100 PCIe": Peak(756, 378, 51),
    "H200": Peak(989, 495, 67),
    "GH200": Peak(989, 495, 67),
    "B200": Peak(2250, 1125, 75),
    "L4": Peak(121, 60, 30.3),
    "L40S": Peak(362, 183, 91.6),
}


def peak_flops(device_name: str, precision: Kind, matmul_precision: str) -> float | None:
    """Return the FLOP/s of a GPU by the longest name that fits; None for another one, and for a slice of one."""
    words = set(device_name.replace("-", " ").split())
    matches = [name for name in PEAKS if set(name.split()) <= words and "MIG" not in words]
    if not matches:
        return None
    peak = PEAKS[max(matches, key=len)]
    return 1e12 * (peak.half if precision != "fp32" else peak.fp32 if matmul_precision == "highest" else peak.tf32)


@dataclass(frozen=True)
class ModelFlops:
    per_sample: float  # of a training step
    peak: float  # per second, of all GPUs together

    def utilization(self, samples_per_second: float) -> float:
        return samples_per_second * self.per_sample / self.peak


def measure_flops(
    strategy: Strategy, config: Train, micro_batches: Callable[[], Iterable[MicroBatch]]
) -> ModelFlops | None:
    """Count the operations of a sample in one pass; None unless every process has a whole model and a known GPU.

    All processes take part. The pass leaves no trace: `micro_batches` seeds the random generators again.
    """
    group, splits = strategy.group, config.tensor_parallel * config.expert_parallel * config.pipeline_parallel
    if group.device.type != "cuda" or splits > 1 or config.strategy in ("horovod", "parameter_server"):
        return None
    name, precision = torch.cuda.get_device_name(group.device), strategy.objective.precision.kind
    peaks = group.gather(peak_flops(name, precision, config.matmul_precision))
    if None in peaks:
        return None
    batch = next(iter(micro_batches())).columns
    return ModelFlops(count_flops(strategy, batch), sum(peaks))


_SAMPLES = 2  # as batch norm needs; the memory of a pass does not matter then


def count_flops(strategy: Strategy, batch: Mapping[str, Tensor]) -> float:
    """Count the operations of a forward and a backward pass, per sample."""
    model, objective = strategy.model, strategy.objective
    samples = {name: column[:_SAMPLES] for name, column in batch.items()}
    counter = FlopCounterMode(display=False, custom_mapping={grouped_mm: grouped_mm_flops})
    with restored_buffers(model), without_recomputation(model), torch.compiler.set_stance("force_eager"), counter:
        objective.backward(objective.loss(model, samples))
    model.zero_grad(set_to_none=True)
    total: int = counter.get_total_flops()
    return total / len(next(iter(samples.values())))


def grouped_mm_flops(left: tuple[int, ...], right: tuple[int, ...], *_: Any, **_options: Any) -> int:
    """Return the operations of a product in groups, such as the tokens of each expert, whatever their sizes."""
    rows = left[1:] if len(left) > len(right) else left  # every column of `right` is in one group
    return 2 * prod(rows) * right[-1]
