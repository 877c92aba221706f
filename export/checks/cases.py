"""Cases: batches with torch's outputs for them, of test samples, of random values, and of shapes never traced."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from export.compare import Array, Arrays, Attempts, Case, has_missing
from export.conversion.padding import MASK
from export.conversion.shapes import MODEL_ERRORS, run_model, untraced_batches
from pipeline.contract.data import Samples, forward, name_outputs
from pipeline.contract.settings.stages import Export
from pipeline.contract.task import Task

Batch = Mapping[str, Tensor]
Inputs = Iterable[tuple[str, str, Batch]]  # the kind, the text and the batch of a case
REAL, RANDOM, SHAPES = "real samples", "random inputs", "shapes"
_VALUE_SAMPLES = 256  # samples from whose values random inputs are drawn


@torch.no_grad()
def evaluated_outputs(task: Task, model: nn.Module, batch: Batch) -> Arrays:
    """Return torch's outputs as the evaluation computes them."""
    return named_arrays(task, forward(model, task, batch))


def torch_outputs(task: Task, model: nn.Module, samples: Samples, size: int) -> Arrays:
    parts = [evaluated_outputs(task, model, batch) for batch in samples.batches(range(len(samples)), size)]
    return {name: np.concatenate([part[name] for part in parts]) for name in task.outputs}


def to_array(tensor: Tensor) -> Array:
    """Return numbers for numpy, which has no bfloat16: it becomes float32."""
    array: Array = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).detach().cpu().numpy()
    return array


def named_arrays(task: Task, outputs: Any) -> Arrays:
    return {name: to_array(tensor) for name, tensor in name_outputs(task, outputs).items()}


def to_feed(task: Task, batch: Batch) -> Arrays:
    return {name: batch[name].numpy() for name in task.inputs}


def make_cases(
    task: Task, model: nn.Module, inputs: Inputs, samples: Samples, attempts: Attempts, seconds: float = np.inf
) -> Iterator[Case]:
    """Yield cases, as many as `seconds` allow, but one at least; note those for which torch fails or returns NaN."""
    end, count = time.perf_counter() + seconds, 0
    for kind, text, batch in inputs:
        if count and time.perf_counter() > end:
            attempts.left_out.append(f"further {kind}: they would take longer than the test set")
            return
        attempts.count += 1
        try:
            accepted, outputs = run_model(task, model, batch, samples)
        except MODEL_ERRORS as error:
            attempts.failures.append(f"{text} ({' '.join(str(error).split())[:160]})")
            continue
        case = Case(kind, text, to_feed(task, accepted), named_arrays(task, outputs))
        has_nan = any(np.isnan(array).any() for array in case.expected.values())
        if kind != REAL and has_nan and not has_missing(case.feed):
            attempts.failures.append(f"{text} (it returns NaN)")
            continue
        count += 1
        yield case


def sample_cases(task: Task, model: nn.Module, samples: Samples, config: Export, attempts: Attempts) -> Iterator[Case]:
    """Yield test samples and random inputs in a batch of each size."""

    def inputs() -> Inputs:
        for size in config.batch_sizes:
            rows = range(min(size, len(samples)))
            yield REAL, f"batch {len(rows)} of test samples", samples.batch(rows)
            yield RANDOM, f"batch {size} of random inputs", random_batch(task, samples, size, size)

    return make_cases(task, model, inputs(), samples, attempts)


def shape_cases(task: Task, model: nn.Module, samples: Samples, attempts: Attempts) -> Iterator[Case]:
    """Yield lengths, batch sizes and paddings that were not traced; note those for which torch fails."""
    failed, compared = list[Mapping[str, int]](), list[Mapping[str, int]]()
    for untraced in untraced_batches(task, samples):
        text = f"batch {untraced.rows}, {untraced.text}"
        attempts.count += 1
        try:
            batch, outputs = run_model(task, model, untraced.batch, samples)
        except MODEL_ERRORS as error:
            attempts.failures.append(f"{text} ({' '.join(str(error).split())[:160]})")
            failed.append(untraced.sizes)
            continue
        compared.append(untraced.sizes)
        expected = named_arrays(task, outputs)
        yield Case(SHAPES, text, to_feed(task, batch), expected, _position_masks(expected, untraced.token_mask))
    least = {axis: min(sizes[axis] for sizes in compared) for axis in failed[0]} if failed and compared else {}
    if bounds := {axis: size for axis, size in least.items() if all(sizes[axis] < size for sizes in failed)}:
        attempts.advice = f"; if no shorter inputs are to be served, set `shortest = {json.dumps(bounds)}` in the task"


def _position_masks(outputs: Arrays, mask: Array | None) -> dict[str, Array]:
    """Return the mask of tokens for each output that has one value per position."""
    return {} if mask is None else {name: mask for name, array in outputs.items() if array.shape[:2] == mask.shape}


def random_batch(task: Task, samples: Samples, rows: int, seed: int) -> dict[str, Tensor]:
    """Return a batch of values drawn at random from the data; floats also between the smallest and the largest.

    Masks are kept as they are, and integers stay among the values that occur.
    """
    generator = torch.Generator().manual_seed(seed)
    real = samples.batch([index % len(samples) for index in range(rows)])
    pool = samples.batch(range(min(_VALUE_SAMPLES, len(samples))))
    return {**real, **{name: _random_column(pool[name], real[name], generator) for name in task.inputs if name != MASK}}


def _random_column(pool: Tensor, real: Tensor, generator: torch.Generator) -> Tensor:
    index = torch.randint(pool.numel(), real.shape, generator=generator)
    values = pool.reshape(-1)[index]
    if not real.dtype.is_floating_point:
        return values
    known = pool[~pool.isnan()]
    low, high = (float(bound) for bound in known.aminmax()) if known.numel() else (np.nan, np.nan)
    if not np.isfinite([low, high]).all():
        return values
    uniform = torch.rand(real.shape, generator=generator, dtype=torch.float64) * (high - low) + low
    use_pool = torch.rand(real.shape, generator=generator) < 0.5
    return torch.where(use_pool, values, uniform.to(real.dtype))
