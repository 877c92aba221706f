"""Building a model without memory for its parameters, but for the few that no file holds."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection
from typing import Any, Self

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from pipeline.spec.errors import ConfigError

Make = Callable[[], nn.Module]


class Bare:
    """Buffers are as they were reckoned: rotary frequencies and masks are in no file."""

    def __init__(self, make: Make) -> None:
        self._make = make
        with _Registering(()) as self._registered:
            self.model = make()

    def begun(self, names: Collection[str], seeded: Callable[[], None]) -> dict[str, nn.Parameter]:
        """These parameters as the task begins them; they alone have memory, all the others draw no random numbers.

        The model is built once more, and those are kept that are registered at the same turns.
        """
        wanted = {name: self.model.get_parameter(name) for name in names}
        turns = {name: self._registered.turns.get(id(parameter)) for name, parameter in wanted.items()}
        if untold := [name for name, turn in turns.items() if turn is None]:
            raise ConfigError(
                f"adapt(): {untold[0]} is not set as a parameter of a module; write module.name = Parameter"
            )
        seeded()
        with _Registering({turn for turn in turns.values() if turn is not None}), _Staying():
            again = self._make()
        found = {name: again.get_parameter(name) for name in names}
        if odd := [name for name, new in found.items() if new.is_meta or new.shape != wanted[name].shape]:
            raise ConfigError(
                f"adapt(): builds {odd[0]} in another way each time, or out of weights that are filled in only later; "
                "it must build the same model, and begin what is new by itself"
            )
        return found


class _Staying(TorchFunctionMode):
    """Adapters go to the device of the layer they are put around, which here has none: they stay."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.to and not args[0].is_meta:
            device, dtype, *_ = torch._C._nn._parse_to(*args[1:], **(kwargs or {}))
            if device is not None and device.type == "meta":
                return args[0] if dtype is None else args[0].to(dtype)
        return func(*args, **(kwargs or {}))


class _Registering:
    """While it is entered, parameters lose their memory when a module takes them, before they are filled with numbers.

    Each has the turn at which it was taken, and so has a copy of it; those of the turns that are `kept` stay whole.
    """

    def __init__(self, kept: Collection[int]) -> None:
        self._kept, self._count = kept, 0
        self._alive: list[nn.Parameter] = []  # so that no two have had one id
        self._instead: dict[int, tuple[weakref.ref[nn.Parameter], nn.Parameter]] = {}  # by the id of what was handed in
        self.turns: dict[int, int] = {}

    def __enter__(self) -> Self:
        self._register, self._copy = nn.Module.register_parameter, nn.Parameter.__deepcopy__
        registering = self

        def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
            registering._register(module, name, None if parameter is None else registering._taken(parameter))

        def copied(parameter: nn.Parameter, memo: dict[int, Any]) -> nn.Parameter:
            made: nn.Parameter = registering._copy(parameter, memo)  # type: ignore[no-untyped-call]
            if id(parameter) in registering.turns:
                registering._note(made, registering.turns[id(parameter)])
            return made

        nn.Module.register_parameter = register  # type: ignore[method-assign,assignment]
        nn.Parameter.__deepcopy__ = copied  # type: ignore[method-assign,assignment]
        return self

    def __exit__(self, *_: object) -> None:
        nn.Module.register_parameter = self._register  # type: ignore[method-assign]
        nn.Parameter.__deepcopy__ = self._copy  # type: ignore[method-assign]

    def _taken(self, parameter: nn.Parameter) -> nn.Parameter:
        if id(parameter) in self.turns:
            return parameter
        handed, taken = self._instead.get(id(parameter), (None, parameter))
        if handed is None or handed() is not parameter:  # an id may have belonged to one that is gone
            taken = parameter
            if self._count not in self._kept and not parameter.is_meta:
                bare = torch.empty_like(parameter, device="meta")
                taken = nn.Parameter(bare, requires_grad=parameter.requires_grad)
                self._instead[id(parameter)] = weakref.ref(parameter), taken
            self._note(taken, self._count)
            self._count += 1
        return taken

    def _note(self, parameter: nn.Parameter, turn: int) -> None:
        self.turns[id(parameter)] = turn
        self._alive.append(parameter)
