"""Mixed precision: which type the forward pass runs in, and gradient scaling where fp16 needs it."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Precision:
    def __init__(self, kind: Literal["fp32", "bf16", "fp16"], device: torch.device) -> None:
        self.kind = kind
        self.type = _TYPES.get(kind)  # none: the weights' own
        self._device = device.type
        self._autocasts = self.type is not None
        # A scaler that is not enabled hands everything through, so there is one path for all types.
        self.scaler = torch.amp.GradScaler(self._device, enabled=kind == "fp16")
        self.overflows = 0  # steps that were skipped because a gradient did not fit

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        if not self._autocasts:
            return contextlib.nullcontext()
        return torch.autocast(self._device, dtype=self.type)

    def cast_by_model(self) -> torch.dtype | None:
        """The model casts its weights and inputs to this type by itself; autocast stays out of its way."""
        self._autocasts = False
        return self.type

    def backward(self, loss: Tensor) -> None:
        torch.autograd.backward(self.scaler.scale(loss))

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        if self.scaler.is_enabled():
            self.scaler.unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Apply the gradients, or, in fp16 after an overflow, skip them and lower the scale."""
        self.scaler.step(optimizer)
        self.scaler.update()

    def state(self) -> dict[str, Any]:
        """Empty where nothing is scaled."""
        return {**self.scaler.state_dict(), "overflows": self.overflows} if self.scaler.is_enabled() else {}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.scaler.load_state_dict({name: value for name, value in state.items() if name != "overflows"})
        self.overflows = state["overflows"]

    def told(self) -> dict[str, float]:
        """For the journal and the summary; fp16 alone scales its gradients."""
        return {"loss_scale": self.scaler.get_scale(), "overflow_steps": self.overflows} if self.kind == "fp16" else {}

    @property
    def forgives_overflow(self) -> bool:
        return self.scaler.is_enabled()
