"""Training steps that count for nothing, on a model of their own and without an exchange."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from pipeline.spec.data import Samples
from pipeline.spec.sections import Train
from pipeline.spec.task import Task
from train.memory import Saved, held_bytes, predicted
from train.objective import Objective
from train.optimizer import make_optimizer
from train.precision import Precision
from train.seeding import seed_step

_REPEATS = 3  # of a timed step; the shortest counts
_MARGIN = 1.25  # what libraries need beside: conv nets and transformers peaked up to 15 % above the count


class Trial:
    """No pass here waits for another process: whoever runs out of memory leaves nobody behind."""

    def __init__(
        self,
        task: Task,
        config: Train,
        samples: Samples,
        device: torch.device,
        make: Callable[[], nn.Module] | None = None,
    ) -> None:
        seed_step(config.seed, -1, 0)
        self._objective = Objective(task, Precision(config.precision, device))
        self.model = (make or task.model)().to(device).train()
        self._optimizer = make_optimizer(self.model, config.optimizer, config.weight_decay)
        self._samples, self._device = samples, device
        self._measured: dict[int, int] = {}

    def fits(self, micro: int, budget: int) -> bool:
        """Whether a step with micro-batches of this size stays within the budget of bytes."""
        try:
            needed = self.needed_bytes(micro) if self._device.type == "cpu" else self._peak_bytes(micro)
        except RuntimeError as error:
            self._forgive(error)
            return False
        return needed <= budget

    def needed_bytes(self, micro: int) -> int:
        """An estimate, the same every time: weights, gradients, optimizer state and what autograd keeps."""
        if not self._measured:
            self._step(micro, 1)  # the optimizer has its state from here on
            self._measured = {size: self._kept_bytes(size) for size in (micro, min(2 * micro, len(self._samples)))}
        return held_bytes(self.model, self._optimizer) + predicted(self._measured, micro)

    def seconds(self, micro: int, passes: int) -> float | None:
        """Of one step; None where memory ran out after all."""
        try:
            self._step(micro, passes)
            return min(self._timed(micro, passes) for _ in range(_REPEATS))
        except RuntimeError as error:
            self._forgive(error)
            return None

    def clear(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _peak_bytes(self, micro: int) -> int:
        torch.cuda.reset_peak_memory_stats(self._device)
        self._step(micro, 1)
        return torch.cuda.max_memory_allocated(self._device)

    def _forgive(self, error: Exception) -> None:
        """Nothing but want of memory, which torch tells of a CPU in words alone."""
        if not isinstance(error, torch.OutOfMemoryError) and "allocate memory" not in str(error):
            raise error
        self.clear()

    def _kept_bytes(self, size: int) -> int:
        """At the turn from the forward pass to the backward pass, where most is held, and a little beyond."""
        batch = self._batch(size)
        saved = Saved(self.model)
        with saved.counting():
            self._objective.loss(self.model, batch)
        # The backward pass starts with everything kept, and makes the gradients of a layer's input and output.
        return round(_MARGIN * (saved.bytes + 2 * saved.largest))

    def _timed(self, micro: int, passes: int) -> float:
        started = time.perf_counter()
        self._step(micro, passes)
        return time.perf_counter() - started

    def _step(self, micro: int, passes: int) -> None:
        batch = self._batch(micro)
        for _ in range(passes):
            self._objective.backward(self._objective.loss(self.model, batch) / passes)
        self._objective.precision.unscale(self._optimizer)
        self._objective.precision.step(self._optimizer)
        self._optimizer.zero_grad(set_to_none=True)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _batch(self, size: int) -> dict[str, Tensor]:
        chosen = range(min(size, len(self._samples)))
        return {name: column.to(self._device) for name, column in self._samples.batch(chosen).items()}
