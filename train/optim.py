"""The optimizer and what belongs to its step: learning rate, mixed precision, random seeds, malloc settings.

The learning rate is a pure function of the step, and random numbers are one of (seed, step, slice): neither has to be
saved in a checkpoint.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import hashlib
import inspect
import math
import random
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pipeline.contract.settings.stages import Train
from pipeline.contract.task import HasOptimizer
from pipeline.system.errors import ConfigError
from pipeline.system.torch_private import foreach_add_, foreach_sub_, fused_adamw_
from train.device.accelerator import HALF_TYPES, Kind, Setting, choose_precision


def make_optimizer(model: nn.Module, settings: Train, task: object = None) -> torch.optim.Optimizer:
    """Create the optimizer of the settings, or the task's own; the schedule scales the learning rate of each group."""
    optimizer: torch.optim.Optimizer
    if isinstance(task, HasOptimizer):
        optimizer = task.optimizer(model, settings)
        _check_optimizer(optimizer, model)
    elif settings.optimizer == "muon":
        optimizer = MuonWithAdamW(model, settings)
    else:
        optimizer = _elementwise_optimizer(list(model.parameters()), settings)
    for group in optimizer.param_groups:
        group[_LR_SHARE] = group["lr"] / settings.lr
    return optimizer


_LR_SHARE = "lr_share"  # a group's learning rate as a multiple of train.lr


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr * group[_LR_SHARE]


def _check_optimizer(optimizer: object, model: nn.Module) -> None:
    """Check what a task's optimizer(model, settings) returned."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"optimizer(): must return a torch.optim.Optimizer, not {type(optimizer).__name__}")
    if (
        inspect.signature(optimizer.step).parameters.get("closure", inspect.Parameter).default
        is inspect.Parameter.empty
    ):
        raise ConfigError(
            f"optimizer(): {type(optimizer).__name__} computes the loss several times in a step, which training does "
            "not support; use an optimizer whose step() needs no closure"
        )
    own = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    if missing := [name for name, p in model.named_parameters() if p.requires_grad and p not in own]:
        raise ConfigError(
            f"optimizer(): leaves out {len(missing)} trained parameters, such as {missing[0]}; to fix it, add them, or "
            "freeze them in model() with requires_grad_(False)"
        )


def check_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Check after the first step that a checkpoint can contain the state: tensors by name."""
    for state in optimizer.state.values():
        if others := [str(key) for key, value in state.items() if not isinstance(value, Tensor)]:
            raise ConfigError(
                f"optimizer(): the state `{others[0]}` of {type(optimizer).__name__} is no tensor, so that no "
                "checkpoint can contain it; use an optimizer that keeps tensors, as those of torch do"
            )


def _elementwise_optimizer(parameters: list[nn.Parameter], settings: Train) -> torch.optim.Optimizer:
    """Create AdamW or SGD; parameters with one axis, biases and norms, get no weight decay."""
    parameters_by_kind: dict[tuple[bool, Any], list[nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.requires_grad:
            mesh = getattr(parameter, "device_mesh", None)  # fused kernels cannot mix sharded and whole parameters
            parameters_by_kind.setdefault((parameter.ndim > 1, mesh), []).append(parameter)
    groups = [
        {"params": parameters, "weight_decay": settings.weight_decay if decayed else 0.0}
        for (decayed, _), parameters in sorted(parameters_by_kind.items(), key=lambda row: not row[0][0])
    ]
    is_unsharded = all(mesh is None for _, mesh in parameters_by_kind)
    if settings.optimizer == "sgd":
        momentum = 0.9 if settings.momentum is None else settings.momentum
        # torch has no fused SGD for sharded parameters
        return torch.optim.SGD(groups, lr=settings.lr, momentum=momentum, fused=is_unsharded)
    is_uniform = len({(p.dtype, p.device) for parameters in parameters_by_kind.values() for p in parameters}) == 1
    kind = FusedAdamW if is_unsharded and is_uniform else torch.optim.AdamW
    return kind(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps, fused=True)


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon for the weights of all linear layers except the last one, AdamW for everything else.

    Muon's updates are scaled to the size of AdamW's, so that one learning rate suits both.
    """

    def __init__(self, model: nn.Module, settings: Train) -> None:
        linear = [module.weight for module in model.modules() if isinstance(module, nn.Linear)]
        embeddings = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
        others = {id(weight) for weight in (*linear[-1:], *embeddings)}  # an embedding may be tied to a linear layer
        hidden = {id(w): w for w in linear if w.requires_grad and id(w) not in others}
        rest = [p for p in model.parameters() if p.requires_grad and id(p) not in hidden]
        self._parts: list[torch.optim.Optimizer] = []
        if hidden:
            momentum = 0.95 if settings.momentum is None else settings.momentum
            self._parts.append(
                torch.optim.Muon(
                    hidden.values(),
                    lr=settings.lr,
                    weight_decay=settings.weight_decay,
                    momentum=momentum,
                    adjust_lr_fn="match_rms_adamw",
                )
            )
        if rest:
            self._parts.append(_elementwise_optimizer(rest, settings))
        super().__init__([group for part in self._parts for group in part.param_groups], {})
        for part in self._parts:  # one state and the same groups, which the trainer and checkpoints see
            part.state = self.state

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        assert closure is None, "gradients are computed already"
        for part in self._parts:
            part.step()


class FusedAdamW(torch.optim.AdamW):
    """AdamW for parameters of one type on one device: torch's kernel without grouping them again at every step."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        assert closure is None, "gradients are computed already"
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if parameters:
                self._update(
                    group,
                    parameters,
                    [self.state[parameter] or self._initial_state(parameter) for parameter in parameters],
                )

    def _initial_state(self, parameter: Tensor) -> dict[str, Tensor]:
        state = {"step": torch.zeros((), device=parameter.device, dtype=torch.float32)}
        state |= {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
        self.state[parameter] = state
        return state

    def _update(self, group: dict[str, Any], parameters: list[Tensor], state: list[dict[str, Tensor]]) -> None:
        steps = [entry["step"] for entry in state]
        overflow = getattr(self, "found_inf", None)  # set by a GradScaler: after an overflow nothing is changed
        foreach_add_(steps, 1)
        fused_adamw_(
            parameters,
            [parameter.grad for parameter in parameters if parameter.grad is not None],
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
            foreach_sub_(steps, [overflow] * len(steps))


def learning_rate(step: int, total: int, settings: Train) -> float:
    """Rise linearly during warm-up, then follow the schedule down to the share `min_lr_ratio` of the peak."""
    warmup_steps = round(total * settings.warmup_ratio)
    if step < warmup_steps:
        return settings.lr * (step + 1) / warmup_steps
    decay_steps = round(total * settings.decay_ratio) if settings.schedule == "wsd" else total - warmup_steps
    decayed = max(0, step - (total - decay_steps)) / max(1, decay_steps)
    shares = {"constant": 1.0, "cosine": (1 + math.cos(math.pi * decayed)) / 2}
    share = shares.get(settings.schedule, 1 - decayed)
    return settings.lr * (settings.min_lr_ratio + (1 - settings.min_lr_ratio) * share)


class Precision:
    """The type of the forward pass, and gradient scaling for fp16."""

    def __init__(self, setting: Setting, device: torch.device) -> None:
        self.kind: Kind = choose_precision(setting, device)
        self.type = HALF_TYPES.get(self.kind)  # None: that of the weights
        self._device = device.type
        self._autocasts = self.type is not None
        # A disabled scaler does nothing, so there is one code path for all types.
        self.scaler = torch.amp.GradScaler(self._device, enabled=self.kind == "fp16")
        self.overflows = 0  # steps skipped because a gradient overflowed

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        if not self._autocasts:
            return contextlib.nullcontext()
        return torch.autocast(self._device, dtype=self.type)

    def cast_by_model(self) -> torch.dtype | None:
        """Switch autocast off for a model that casts weights and inputs itself, and return the type to cast to."""
        self._autocasts = False
        return self.type

    def backward(self, loss: Tensor) -> None:
        torch.autograd.backward(self.scaler.scale(loss))

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        if self.scaler.is_enabled():
            self.scaler.unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Apply the gradients; after an overflow in fp16, skip them and lower the scale."""
        self.scaler.step(optimizer)
        self.scaler.update()

    def state(self) -> dict[str, Any]:
        """Return the scaler's state; empty without fp16."""
        return {**self.scaler.state_dict(), "overflows": self.overflows} if self.scaler.is_enabled() else {}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.scaler.load_state_dict({name: value for name, value in state.items() if name != "overflows"})
        self.overflows = state["overflows"]

    def metrics(self) -> dict[str, float]:
        """Return the metrics of loss scaling, which only fp16 has."""
        return {"loss_scale": self.scaler.get_scale(), "overflow_steps": self.overflows} if self.kind == "fp16" else {}

    @property
    def forgives_overflow(self) -> bool:
        return self.scaler.is_enabled()


def set_determinism(config: Train) -> None:
    """Make torch deterministic if the settings require it."""
    if config.elastic_shards > 0:
        torch.set_num_threads(1)  # the order of sums depends on the number of threads
    if config.deterministic:
        if config.compile:
            torch.use_deterministic_algorithms(True, warn_only=True)
        else:  # the same for all but torch's compiler, which the other function imports: half a second
            torch.set_deterministic_debug_mode("warn")
        # Filling new memory with NaN finds kernels that read uninitialized memory, but costs a pass over each tensor.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def seed_step(seed: int, step: int, slice_number: int) -> None:
    """Seed every generator that a task may use, before a slice of a step; step -1 creates the model."""
    value = seed_value(seed, step, slice_number)
    _seed_python(value)
    if step < 0:
        torch.manual_seed(value)  # all devices, also those not in use yet
        return
    seed_torch(value)


def seed_torch(value: int) -> None:
    """Seed torch's generators; torch.manual_seed() records a stack trace while CUDA is not initialized."""
    torch.default_generator.manual_seed(value)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed(value)


@contextlib.contextmanager
def sample_rng(seed: int, step: int, part: int, slice_number: int) -> Iterator[None]:
    """Load samples with their own random numbers, the same in a worker and here; restore the generators after."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    value = seed_value(seed, step, slice_number, "data", part)
    _seed_python(value)
    torch.default_generator.manual_seed(value)  # no GPU generator: samples are loaded on the CPU
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


def seed_value(*components: object) -> int:
    """Return a number of 32 bits that depends on all components."""
    parts = (str(part).encode() for part in components)
    digest = hashlib.sha256(b"".join(len(part).to_bytes(8, "big") + part for part in parts))  # the same everywhere
    return int(digest.hexdigest()[:8], 16)


def _seed_python(value: int) -> None:
    random.seed(value)
    np.random.seed(value)  # the global generator is what augmentations use


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # parameters of mallopt(3)


def tune_malloc() -> bool:
    """Make malloc keep freed memory instead of returning it at every step; return whether the C library supports it.

    Activations and gradients are freed and allocated once a step. glibc may return them to the kernel, which then
    provides zeroed pages for the next step with a page fault for each: measured as up to a quarter of a small model's
    step.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
    return mallopt is not None and bool(mallopt(_MMAP_THRESHOLD, 1 << 30) and mallopt(_TRIM_THRESHOLD, (1 << 31) - 1))


def freeze_garbage_collector() -> None:
    """Exclude all objects that exist now, such as model and modules, from garbage collection: it scans them again."""
    gc.collect()
    gc.freeze()
