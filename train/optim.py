"""The optimizer by its word in the configuration; one fused kernel for all parameters.

The learning rate as a pure function of the step.

Mixed precision: which type the forward pass runs in, and gradient scaling where fp16 needs it.

Randomness as a function of (seed, step, rank), so that nothing about it needs saving.

Memory that a training step frees and the next one asks for again, in the C library and in Python.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import math
import random
import sys
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from pipeline.contract.files import digest_parts
from pipeline.contract.settings.stages import Train


def make_optimizer(model: nn.Module, kind: str, weight_decay: float) -> torch.optim.Optimizer:
    """Biases and norms, the parameters of one axis, are not decayed."""
    rows: dict[tuple[bool, Any], list[nn.Parameter]] = {}
    for parameter in model.parameters():
        if parameter.requires_grad:
            mesh = getattr(parameter, "device_mesh", None)  # a kernel takes what is cut the same way, or not at all
            rows.setdefault((parameter.ndim > 1, mesh), []).append(parameter)
    groups = [
        {"params": parameters, "weight_decay": weight_decay if decayed else 0.0}
        for (decayed, _), parameters in sorted(rows.items(), key=lambda row: not row[0][0])
    ]
    plain = all(type(parameter) is nn.Parameter for parameters in rows.values() for parameter in parameters)
    if kind == "sgd":
        return torch.optim.SGD(groups, lr=0.0, momentum=0.9, fused=plain)  # torch has no fused one for what is cut
    one_kind = len({(p.dtype, p.device) for parameters in rows.values() for p in parameters}) == 1
    return (LeanAdamW if plain and one_kind else torch.optim.AdamW)(groups, lr=0.0, fused=True)


class LeanAdamW(torch.optim.AdamW):
    """AdamW for parameters of one type on one device: the same kernel, without sorting them at every step."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        assert closure is None, "gradients are there already"
        for group in self.param_groups:
            trained = [parameter for parameter in group["params"] if parameter.grad is not None]
            if trained:
                self._update(group, trained, [self.state[parameter] or self._begin(parameter) for parameter in trained])

    def _begin(self, parameter: Tensor) -> dict[str, Tensor]:
        state = {"step": torch.zeros((), device=parameter.device, dtype=torch.float32)}
        state |= {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
        self.state[parameter] = state
        return state

    def _update(self, group: dict[str, Any], trained: list[Tensor], state: list[dict[str, Tensor]]) -> None:
        steps = [entry["step"] for entry in state]
        overflow = getattr(self, "found_inf", None)  # left by a GradScaler: then nothing is changed
        torch._foreach_add_(steps, 1)
        torch._fused_adamw_(
            trained,
            [parameter.grad for parameter in trained if parameter.grad is not None],
            [entry["exp_avg"] for entry in state],
            [entry["exp_avg_sq"] for entry in state],
            [],
            steps,
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
            grad_scale=getattr(self, "grad_scale", None),
            found_inf=overflow,
        )
        if overflow is not None:
            torch._foreach_sub_(steps, [overflow] * len(steps))


def learning_rate(step: int, total: int, peak: float, warmup: float, kind: Literal["cosine", "constant"]) -> float:
    """Linear from zero over the first `warmup` share of all steps, then constant or a half cosine towards zero."""
    rising = round(total * warmup)
    if step < rising:
        return peak * (step + 1) / rising
    if kind == "constant":
        return peak
    return peak * (1 + math.cos(math.pi * (step - rising) / max(1, total - rising))) / 2


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


def be_deterministic(config: Train) -> None:
    """Ask torch for the same bits at every run, where the configuration wants that."""
    if config.elastic == "exact":
        torch.set_num_threads(1)  # kernels add up in another order with another number of threads
    if config.deterministic:
        torch.use_deterministic_algorithms(True, warn_only=True)
        # Filling fresh memory with NaN finds kernels that read what nobody wrote; it costs a pass over each tensor.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def seed_step(seed: int, step: int, rank: int) -> None:
    """Reset every generator a task may draw from before a step; step -1 is the making of the model."""
    value = _value(seed, step, rank)
    _seed_python(value)
    if step < 0:
        torch.manual_seed(value)  # of every kind of device, also of one that is not in use yet
        return
    torch.default_generator.manual_seed(value)  # manual_seed() notes a stack trace each time where CUDA sleeps
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed(value)


@contextlib.contextmanager
def drawing(seed: int, step: int, part: int, rank: int) -> Iterator[None]:
    """Samples are loaded with generators of their own: in a worker or here, they draw the same numbers."""
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    value = _value(seed, step, rank, "data", part)
    _seed_python(value)
    torch.default_generator.manual_seed(value)  # not those of GPUs: no sample is drawn there
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])


def _value(*place: object) -> int:
    return int(digest_parts([str(part) for part in place])[:8], 16)


def _seed_python(value: int) -> None:
    random.seed(value)
    np.random.seed(value)  # the global generator is what augmentations use


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # parameters of mallopt(3)


def keep_freed_memory() -> bool:
    """Reuse freed memory instead of giving it back to the system at every step; whether the C library can do that.

    Activations and gradients are freed and allocated once a step. Depending on what else lies in the heap, glibc gives
    them back, and the kernel hands out zeroed pages for the next step, a fault for each: measured as up to a quarter of
    a small net's step.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
    return mallopt is not None and bool(mallopt(_MMAP_THRESHOLD, 1 << 30) and mallopt(_TRIM_THRESHOLD, (1 << 31) - 1))


def forget_what_lasts() -> None:
    """Leave model, optimizer and modules out of the search for garbage: it would walk over them all again and again."""
    gc.collect()
    gc.freeze()
