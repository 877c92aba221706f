"""Where this process stands in the step, for whoever asks why the others wait."""

from __future__ import annotations

from typing import Literal, get_args

# In the order of a step: who waits for another is further than that one.
Phase = Literal["start", "data", "forward and backward", "update", "exchange of weights", "validation", "checkpoint"]
PHASES: tuple[Phase, ...] = get_args(Phase)


class Watch:
    def __init__(self) -> None:
        self.position: tuple[int, Phase] = (0, "start")

    def at(self, step: int, phase: Phase) -> None:
        """A plain assignment: cheap enough for every phase of every step."""
        self.position = (step, phase)

    def again(self) -> None:
        """The phase goes on, and something in it was done: a new tuple, which is what the watchman looks for."""
        step, phase = self.position
        self.position = (step, phase)
