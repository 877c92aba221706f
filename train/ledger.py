"""The sample ledger: which samples each committed step was trained on, and its verification.

Training writes one line per global step with a digest of the samples that were really passed to the model.
`verify_ledger` compares the lines with the planned order of samples.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from pipeline.contract.settings.section import Frozen
from pipeline.system.errors import BundleError
from pipeline.system.files import unwritable, write_atomic
from train.batch_order import BatchOrder, Indices
from train.chaos_hooks import run_chaos_hook
from train.process_group import ProcessGroup
from train.sample_checksums import SampleChecksums

LEDGER_FILE = "ledger.jsonl"

_Counted = Annotated[int, Field(ge=1)]


class LedgerLine(Frozen):
    """One global step, as it was trained."""

    step: _Counted  # number of steps done, with this one
    epoch: Annotated[int, Field(ge=0)]
    samples: _Counted
    digest: str  # of the samples' indices, in the order of the batch
    processes: _Counted
    attempt: _Counted
    contents: str = ""  # digest of the checksums of its samples, where prepare wrote some
    skipped: bool = False  # the gradient overflowed fp16, so the weights are those of the step before


@dataclass(frozen=True)
class LedgerVerification:
    """Result of comparing a ledger with the plan. `fault` is empty when every line is the planned one."""

    steps: int
    epochs: float
    samples: int  # of the split
    lost: int  # uses of a sample that are missing in an epoch, over all epochs
    repeated: int  # and those there are too many of
    attempts: int
    processes: tuple[int, int]  # minimum and maximum
    fault: str
    compared: int = 0  # steps whose contents were compared with what prepare read
    skipped_steps: int = 0
    skipped_samples: int = 0  # uses of samples in them
    drawn: bool = False  # samples are drawn by weight, so that an epoch may use one several times or not at all


def batch_digest(ids: Indices) -> str:
    return hashlib.sha256(ids.astype("<i8").tobytes()).hexdigest()


def read_lines(path: Path, growing: bool = False) -> list[LedgerLine]:
    """Read every line of a ledger; one that is still `growing` may end in half a line, which is left out."""
    try:
        rows = path.read_text().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise BundleError(f"{path}: cannot be read ({error}); without it, the samples used are unknown") from error
    last_row = rows.pop()
    if last_row and not growing:
        rows.append(last_row)
    lines = []
    for number, row in enumerate(rows, start=1):
        lines.append(LedgerLine.parse(row.encode(), f"{path}, line {number}", "`pipe run --force train`", BundleError))
    return lines


def verify_ledger(
    lines: Sequence[LedgerLine], order: BatchOrder, steps: int, checksums: SampleChecksums | None = None
) -> LedgerVerification:
    """Compare the lines with the plan of the first `steps` steps, and count each sample's uses in each epoch."""
    trained = list(_trained_steps(lines, order))
    lost, repeated = _count(lines, trained, order, steps)
    process_counts = [line.processes for line in lines] or [0]
    return LedgerVerification(
        steps=steps,
        epochs=round(steps / order.steps_per_epoch, 2),
        samples=order.samples,
        lost=lost,
        repeated=repeated,
        attempts=len({line.attempt for line in lines}),
        processes=(min(process_counts), max(process_counts)),
        fault=next(_faults(lines, trained, order, steps, checksums), ""),
        compared=sum(bool(line.contents) for line in lines) if checksums else 0,
        skipped_steps=sum(line.skipped for line in lines),
        skipped_samples=sum(line.samples for line in lines if line.skipped),
        drawn=order.kind == "weights",
    )


def _trained_steps(lines: Sequence[LedgerLine], order: BatchOrder) -> Iterator[int | None]:
    """Return for each line the step, counted from 0, whose samples it has; None for samples of no step."""
    step_by_digest: dict[str, int] | None = None
    for line in lines:
        if batch_digest(order.batch(line.step - 1)) == line.digest:
            yield line.step - 1
            continue
        if step_by_digest is None:
            step_by_digest = {batch_digest(order.batch(step)): step for step in range(max(line.step for line in lines))}
        yield step_by_digest.get(line.digest)


def _count(
    lines: Sequence[LedgerLine], trained: Sequence[int | None], order: BatchOrder, steps: int
) -> tuple[int, int]:
    """Count lost and repeated uses. Each epoch counts for itself: others do not make up for a lost sample."""
    batches_by_epoch: dict[int, list[Indices]] = {
        order.epoch_of(step): [] for step in range(0, steps, order.steps_per_epoch)
    }
    for line, step in zip(lines, trained, strict=True):
        batches = batches_by_epoch.setdefault(order.epoch_of(line.step - 1), [])
        if step is not None:
            batches.append(order.batch(step))
    lost = repeated = 0
    for epoch, batches in batches_by_epoch.items():
        counts = _uses(batches, order) - _planned_uses(epoch, order, steps)
        lost -= int(counts[counts < 0].sum())
        repeated += int(counts[counts > 0].sum())
    return lost, repeated


def _planned_uses(epoch: int, order: BatchOrder, steps: int) -> Indices:
    """Return how often an epoch uses each sample: once or as drawn; in an incomplete epoch, as far as it got."""
    first_step = epoch * order.steps_per_epoch
    stop = first_step + order.steps_per_epoch
    if stop <= steps and order.kind != "weights":
        return np.ones(order.samples, np.int64)
    return _uses([order.batch(step) for step in range(first_step, min(stop, steps))], order)


def _uses(batches: Sequence[Indices], order: BatchOrder) -> Indices:
    indices = np.concatenate(batches) if batches else np.empty(0, np.int64)
    return np.bincount(indices, minlength=order.samples)


def _faults(
    lines: Sequence[LedgerLine],
    trained: Sequence[int | None],
    order: BatchOrder,
    steps: int,
    checksums: SampleChecksums | None,
) -> Iterator[str]:
    """Yield what is wrong, in the order of the lines."""
    all_steps = {line.step for line in lines}
    seen_steps: set[int] = set()
    attempt = 1
    for number, (line, step) in enumerate(zip(lines, trained, strict=True), start=1):
        if line.step in seen_steps:
            yield f"line {number}: a second line of step {line.step}"
        elif line.step != number and number not in all_steps:
            yield f"line {number}: the line of step {number} is missing, this one is of step {line.step}"
        elif line.step != number:
            yield f"line {number}: out of order, it is of step {line.step}"
        elif line.step > steps:
            yield f"line {number}: step {line.step} is beyond the last one, {steps}"
        elif fault := _line_fault(line, step, order, attempt, checksums):
            yield f"line {number}: {fault}"
        seen_steps.add(line.step)
        attempt = max(attempt, line.attempt)
    if len(lines) < steps:
        yield f"the line of step {len(lines) + 1} is missing, {steps} steps were trained"


def _line_fault(
    line: LedgerLine, trained: int | None, order: BatchOrder, attempt: int, checksums: SampleChecksums | None
) -> str:
    """Return how a line at its right place differs from the plan; empty if it does not."""
    planned = line.step - 1
    if trained != planned:
        samples = "samples that no step has" if trained is None else f"the samples of step {trained + 1}"
        return f"step {line.step} was trained on {samples}"
    if line.samples != order.size(planned):
        return f"step {line.step} has {order.size(planned)} samples, not {line.samples}"
    if line.epoch != order.epoch_of(planned):
        return f"step {line.step} belongs to epoch {order.epoch_of(planned)}, not {line.epoch}"
    if line.attempt < attempt:
        return f"attempt {line.attempt} after attempt {attempt}"
    if line.contents and checksums and line.contents != checksums.digest(order.batch(planned), line.epoch):
        return f"step {line.step} was given samples with other contents than those that prepare read"
    return ""


# Steps, the number of samples in each, and the indices and checksums of them all.
_Records = tuple[Indices, Indices, Indices, Indices]


class Ledger:
    """Every process records its samples; the first one writes the lines with the checkpoint of their steps.

    The lines are on disk before the checkpoint gets its final name. A crash between the two leaves lines of steps that
    will be repeated: the next start drops them.
    """

    def __init__(
        self,
        directory: Path,
        group: ProcessGroup,
        order: BatchOrder,
        resumed_step: int,
        attempt: int,
        checksums: SampleChecksums | None = None,
    ) -> None:
        self.checksums = checksums
        self._path, self._group, self._order, self._attempt = directory / LEDGER_FILE, group, order, attempt
        self._records = group.rank.rank % group.model_size == 0  # one process of each copy of the model
        self._samples: dict[int, list[tuple[Indices, Tensor | None]]] = {}
        self._norms: dict[int, Tensor] = {}
        self._unwritten: list[LedgerLine] = []  # collected, not yet on disk
        if group.rank.first:
            _drop_lines_after(self._path, resumed_step)

    def record(self, step: int, indices: Indices, checksums: Tensor | None = None) -> None:
        """Record that a micro-batch of `step`, counted from 0, is passed to the model."""
        if self._records:
            self._samples.setdefault(step, []).append((indices, checksums))

    def record_norm(self, step: int, norm: Tensor) -> None:
        """Record the norm of a gradient that is not applied if it overflowed."""
        self._norms[step] = norm

    def discard(self, step: int) -> None:
        """Forget this process's samples of a step that was not applied: it will be repeated."""
        self._samples.pop(step, None)

    def collect(self) -> Callable[[], None] | None:
        """Collect the lines; return to the first process the function that writes them, for the checkpoint to call.

        It may be called later and in another thread. If a checkpoint fails, the next one's call writes its lines too.
        """
        records = self._group.collect(_flatten(self._samples))
        norms, self._samples, self._norms = self._norms, {}, {}
        if not self._group.rank.first:
            return None
        skipped = {step for step, norm in norms.items() if not torch.isfinite(norm)}
        self._unwritten += self._lines(records, skipped)
        return self._commit

    def _lines(self, records: Sequence[_Records], skipped: Collection[int]) -> list[LedgerLine]:
        """Join the slices: the order of ranks is the order of the batch."""
        batches: dict[int, list[Indices]] = {}
        for steps, counts, *samples in records:
            parts = np.split(np.stack(samples, axis=1), np.cumsum(counts))[:-1]
            for step, part in zip(steps.tolist(), parts, strict=True):
                batches.setdefault(step, []).append(part)
        return [self._line(step, np.concatenate(batches[step]), step in skipped) for step in sorted(batches)]

    def _line(self, step: int, samples: Indices, skipped: bool) -> LedgerLine:
        ids, sums = samples.T
        epoch = self._order.epoch_of(step)
        return LedgerLine(
            step=step + 1,
            epoch=epoch,
            samples=len(ids),
            digest=batch_digest(ids),
            processes=self._group.size,
            attempt=self._attempt,
            contents=self.checksums.digest(ids, epoch, sums) if self.checksums else "",
            skipped=skipped,
        )

    def _commit(self) -> None:
        run_chaos_hook("ledger")
        try:
            with self._path.open("a") as file:
                file.write("".join(f"{line.model_dump_json()}\n" for line in self._unwritten))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise unwritable(self._path, error) from error
        self._unwritten.clear()


def row_number(row: str, name: str) -> int:
    """Return a number of a row that may be damaged; 0 if it has none."""
    try:
        number = json.loads(row)[name]
    except (ValueError, KeyError, TypeError):
        return 0
    return number if isinstance(number, int) else 0


def last_attempt(path: Path) -> int:
    """Return the number of the last attempt that wrote lines, intact ones; 0 without any."""
    rows = path.read_text(errors="replace").split("\n") if path.exists() else []
    return max((row_number(row, "attempt") for row in rows), default=0)


def _flatten(samples: dict[int, list[tuple[Indices, Tensor | None]]]) -> _Records:
    """Return few arrays, however many steps and micro-batches there were: they are cheap to send."""
    parts = [part for step in samples for part in samples[step]]
    counts = [sum(len(ids) for ids, _ in samples[step]) for step in samples]
    ids = np.concatenate([ids for ids, _ in parts]) if parts else np.empty(0, np.int64)
    known = [sums for _, sums in parts if sums is not None]
    sums = torch.cat(known).cpu().numpy() if known else np.zeros(len(ids), np.int64)
    return np.array(list(samples), np.int64), np.array(counts, np.int64), ids, sums


def _drop_lines_after(path: Path, step: int) -> None:
    """Keep the lines up to the checkpoint that training continues from; later steps will be repeated."""
    rows = path.read_text(errors="replace").split("\n") if path.exists() else []
    kept_rows = [f"{row}\n" for row in rows if 0 < row_number(row, "step") <= step]
    if len(kept_rows) < step:
        print(
            f"warning: {path.name} has {len(kept_rows)} lines for the {step} steps of the checkpoint, so `pipe verify` "
            "will fail for this run; to fix it, train again: pipe run train --force train",
            file=sys.stderr,
        )
    write_atomic(path, "".join(kept_rows))
