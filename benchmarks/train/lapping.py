"""Our trainer, stopped at a gate every few steps."""

from __future__ import annotations

from collections.abc import Callable

from train.trainer import Trainer


class Lapping(Trainer):
    gate: Callable[[], None]
    lap: int  # steps

    def _step(self, step: int) -> None:
        if step % self.lap == 0:
            self.gate()
        super()._step(step)
