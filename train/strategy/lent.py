"""Weights for a look at what a model does before it is cut: one block's at a time, as they will not be kept."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from train.pretrained.filling import Filling
from train.strategy.units import units

CPU = torch.device("cpu")


class Lent:
    """Of a model that has its weights, nothing is to be lent."""

    def __init__(self, filling: Filling | None = None, device: torch.device = CPU) -> None:
        self._filling, self._device = filling, device

    def module(self, module: nn.Module, name: str) -> contextlib.AbstractContextManager[None]:
        """All of it, for as long as the context is open."""
        if self._filling is None:
            return contextlib.nullcontext()
        return self._filling.lend(module, self._device, f"{name}." if name else "")

    @contextlib.contextmanager
    def passing(self, model: nn.Module) -> Iterator[None]:
        """For passes of the whole model: a repeated block while it works, what stands beside them all the time."""
        if self._filling is None:
            yield
            return
        blocks = {unit.name: unit.module for unit in units(model) if unit.repeated}
        handles = [handle for name, block in blocks.items() for handle in self._hooks(block, name)]
        inside = {id(below) for block in blocks.values() for below in block.modules()}
        try:
            with self._filling.lend(model, self._device, skip=inside), self._filling.remembering(self._device):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _hooks(self, block: nn.Module, name: str) -> Iterator[Any]:
        held: list[contextlib.ExitStack] = []

        def before(*_: Any) -> None:
            stack = contextlib.ExitStack()
            stack.enter_context(self.module(block, name))
            held.append(stack)

        def after(*_: Any) -> None:
            held.pop().close()

        yield block.register_forward_pre_hook(before, prepend=True)
        yield block.register_forward_hook(after, always_call=True)
