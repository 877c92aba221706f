"""Compare the file with torch wherever it may run: providers, threads, batch sizes, random inputs, untraced shapes.

The whole test set is compared once, with the settings a service has by default (export/parity.py). Here every other
way to run gets a batch of each size, of real samples and of values drawn at random from the data.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from torch import Tensor, nn

from export.parity import Arrays, Comparison, measure, named_arrays, run
from export.to_onnx import MASK, variants
from pipeline.contract.data import Samples, forward
from pipeline.contract.errors import StageError
from pipeline.contract.processes import cuda_problem
from pipeline.contract.settings.stages import Export
from pipeline.contract.task import HasAxes, Task

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
_SERVED = (CPU, CUDA)  # providers a service can be configured for
_DRAWN_FROM = 256  # samples whose values random inputs are drawn from


@dataclass(frozen=True)
class Place:
    """A way to run the file. `exact`: without TF32, which CUDA uses by default for products."""

    provider: str
    threads: int  # 0: as many as there are cores
    exact: bool = True

    @property
    def text(self) -> str:
        if self.provider == CUDA:
            return "CUDA" if self.exact else "CUDA in TF32"
        return f"CPU, {'1 thread' if self.threads == 1 else 'all threads'}"

    def open(self, path: Path) -> onnxruntime.InferenceSession:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        options.intra_op_num_threads = self.threads
        settings = {"use_tf32": "0" if self.exact else "1"} if self.provider == CUDA else {}
        session = onnxruntime.InferenceSession(str(path), options, providers=[(self.provider, settings)])
        if session.get_providers()[0] != self.provider:
            raise StageError(f"{self.provider}: ONNX Runtime has it, but cannot load its libraries")
        return session


@dataclass(frozen=True)
class Coverage:
    """Comparisons beyond the test set, and those that were not possible."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Case:
    """One batch and torch's outputs for it."""

    kind: str  # real samples, random inputs or shapes
    text: str
    feed: Arrays
    expected: Arrays
    seen: np.ndarray[Any, Any] | None = None  # where there is no padding


def places() -> tuple[list[Place], list[str]]:
    """Of this machine; and a sentence for each provider that is not among them."""
    found, without = [Place(CPU, 0), Place(CPU, 1)], []
    available = onnxruntime.get_available_providers()
    if reason := cuda_problem(available):
        without.append(f"{CUDA}: {reason}")
    else:
        found += [Place(CUDA, 0), Place(CUDA, 0, exact=False)]
    without += [f"{name}: no service of ours uses it" for name in available if name not in _SERVED]
    return found, without


def verify_everywhere(task: Task, model: nn.Module, samples: Samples, path: Path, config: Export) -> Coverage:
    """Compare every size and shape at every place; torch computes each once."""
    here, without = places()
    found = Coverage(left_out=without)
    cases = list(answered(task, model, questions(task, samples, config), found.left_out))
    for place in here:
        session = place.open(path)
        for kind in dict.fromkeys(one.kind for one in cases):
            found.rows.append(compare_at(place, session, [one for one in cases if one.kind == kind], config))
    return found


def compare_at(
    place: Place, session: onnxruntime.InferenceSession, cases: Sequence[Case], config: Export
) -> dict[str, Any]:
    """Combine all cases of one kind into one row that names the worst."""
    parts = []
    for one in cases:
        started = time.perf_counter()
        found = run(session, one.feed)
        seconds = time.perf_counter() - started
        parts.append(_measured(one, found, tolerance(place, config, one.expected), seconds, f" ({place.text})"))
    return {**asdict(_together(parts)), "inputs": cases[0].kind, "place": place.text, "batches": len(parts)}


def rows_of(cases: Sequence[Case], found: Sequence[Arrays], config: Export) -> list[dict[str, Any]]:
    """Compare outputs that were computed elsewhere."""
    return [asdict(_measured(one, answer, config, 0.0)) for one, answer in zip(cases, found, strict=True)]


def _measured(one: Case, found: Arrays, config: Export, seconds: float, where: str = "") -> Comparison:
    pairs = {name: tuple(_seen(arrays[name], one.seen) for arrays in (one.expected, found)) for name in one.expected}
    rows = len(next(iter(one.feed.values())))
    return measure(pairs, config, rows, seconds, f"{one.text}{where}")


def tolerance(place: Place, config: Export, expected: Arrays) -> Export:
    """Return the tolerances at a place: TF32 keeps 10 bits of each factor, so errors are relative to the spread."""
    if place.exact:
        return config
    spread = max(
        (float(np.ptp(array)) for array in expected.values() if array.dtype.kind == "f" and array.size), default=0
    )
    spread = spread if np.isfinite(spread) else 0.0
    return config.model_copy(update={"rtol": max(config.rtol, _TF32), "atol": max(config.atol, _TF32 * spread)})


def scrambled(task: Task, samples: Samples, rows: int, seed: int) -> dict[str, Tensor]:
    """Return a batch of values drawn at random from the data; floats also between the smallest and the largest.

    Masks are kept as they are, and integers stay among the values that occur.
    """
    generator = torch.Generator().manual_seed(seed)
    real = samples.batch([index % len(samples) for index in range(rows)])
    known = samples.batch(range(min(_DRAWN_FROM, len(samples))))
    return {**real, **{name: _drawn(known[name], real[name], generator) for name in task.inputs if name != MASK}}


def _drawn(known: Tensor, real: Tensor, generator: torch.Generator) -> Tensor:
    index = torch.randint(known.numel(), real.shape, generator=generator)
    drawn = known.reshape(-1)[index]
    if not real.dtype.is_floating_point:
        return drawn
    low, high = (float(end) for end in known.aminmax())
    if not np.isfinite([low, high]).all():
        return drawn
    between = torch.rand(real.shape, generator=generator, dtype=torch.float64) * (high - low) + low
    half = torch.rand(real.shape, generator=generator) < 0.5
    return torch.where(half, drawn, between.to(real.dtype))


def questions(task: Task, samples: Samples, config: Export) -> Iterator[tuple[str, str, Mapping[str, Tensor], Any]]:
    for size in config.batch_sizes:
        rows = range(min(size, len(samples)))
        yield "real samples", f"batch {len(rows)} of test samples", samples.batch(rows), None
        yield "random inputs", f"batch {size} of random inputs", scrambled(task, samples, size, size), None
    if isinstance(task, HasAxes):
        for one in variants(task, samples):
            seen = one.batch[MASK].numpy() == 1 if MASK in one.batch else None
            yield "shapes", f"batch {one.rows}, {one.text}", one.batch, seen


@torch.no_grad()
def answered(
    task: Task, model: nn.Module, questions: Iterable[tuple[str, str, Mapping[str, Tensor], Any]], left_out: list[str]
) -> Iterator[Case]:
    """Yield torch's outputs for each batch; note the batches for which torch fails or returns NaN."""
    for kind, text, batch, seen in questions:
        try:
            expected = named_arrays(task, forward(model, task, batch))
        except (RuntimeError, IndexError, ValueError) as error:
            left_out.append(f"{text}: torch itself fails ({' '.join(str(error).split())[:160]})")
            continue
        if kind != "real samples" and any(np.isnan(_seen(array, seen)).any() for array in expected.values()):
            left_out.append(f"{text}: torch itself returns NaN")
            continue
        yield Case(kind, text, {name: batch[name].numpy() for name in task.inputs}, expected, seen)


def _seen(array: np.ndarray[Any, Any], seen: np.ndarray[Any, Any] | None) -> np.ndarray[Any, Any]:
    """Leave out padded positions of outputs that have one value per position."""
    return array[seen] if seen is not None and array.shape[:2] == seen.shape else array


def _together(parts: Sequence[Comparison]) -> Comparison:
    worst = max(parts, key=lambda one: (one.beyond_tolerance > 0, one.max_abs_error))
    return replace(
        worst,
        max_rel_error=max(one.max_rel_error for one in parts),
        beyond_tolerance=sum(one.beyond_tolerance for one in parts),
        seconds=sum(one.seconds for one in parts),
    )


_TF32 = 2.0**-7  # eight times what one product is off by: sums of many lose more
