"""Placeholders: tensors with a shape, a type and a device, but no values.

A pipeline stage has them in place of what other stages compute. Operations on them run on the meta device and return
placeholders again, so what depends on a placeholder is known exactly. Unlike meta tensors, they report a real device:
`torch.arange(n, device=x.device)` is real, and so is `torch.zeros_like(x)`.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from pipeline.system.torch_private import (
    OpOverload,
    disabled_torch_function,
    make_wrapper_subclass,
    operator_schema,
    return_and_correct_aliasing,
    tree_leaves,
    tree_map,
)

_aten = torch.ops.aten
_FACTORIES = {  # they take only shape, type and device from a tensor
    _aten.zeros_like.default,
    _aten.ones_like.default,
    _aten.full_like.default,
    _aten.empty_like.default,
    _aten.new_zeros.default,
    _aten.new_ones.default,
    _aten.new_full.default,
    _aten.new_empty.default,
}
_INDEXING = {_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default}
_META = torch.device("meta")
_NEEDS_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class NoValuesError(RuntimeError):
    """An operation needs the values of a placeholder."""

    def __init__(self, operation: object) -> None:
        super().__init__(f"{operation} needs the values of a placeholder")


class Placeholder(Tensor):
    """A tensor like another one, but without values, and on a device of choice."""

    __torch_function__ = disabled_torch_function  # type: ignore[assignment]  # else factories return placeholders, too

    @staticmethod
    def __new__(cls, like: Tensor, device: torch.device) -> Placeholder:
        return make_wrapper_subclass(cls, like.shape, strides=like.stride(), dtype=like.dtype, device=device)

    @classmethod
    def __torch_dispatch__(cls, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        if function in _FACTORIES:
            return function(_empty(args[0], args[0].device), *args[1:], **kwargs)
        if any(not isinstance(tensor, Placeholder) for tensor in _written_tensors(function, args, kwargs)):
            raise NoValuesError(function)
        if function in _INDEXING:
            args = (args[0], list(_without_masks(args[1])), *args[2:])
        device = kwargs.get("device") or next(x.device for x in tree_leaves((args, kwargs)) if isinstance(x, cls))
        try:
            result = function(*tree_map(_to_meta, args), **tree_map(_to_meta, kwargs))
        except RuntimeError as error:
            if isinstance(error, NotImplementedError) or not _NEEDS_VALUES.isdisjoint(function.tags):
                raise NoValuesError(function) from error
            raise
        result = tree_map(lambda x: cls(x, device) if isinstance(x, Tensor) else x, result)
        return return_and_correct_aliasing(function, args, kwargs, result)  # type: ignore[no-untyped-call]

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Placeholder(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    def data_ptr(self) -> NoReturn:  # kernels of Triton would read from address 0
        raise NoValuesError("data_ptr()")

    def tolist(self) -> NoReturn:
        raise NoValuesError("tolist()")

    def numpy(self, *, force: bool = False) -> NoReturn:  # noqa: ARG002
        raise NoValuesError("numpy()")


def has_placeholder(values: Any) -> bool:
    """Return whether nested containers hold a placeholder."""
    return any(isinstance(leaf, Placeholder) for leaf in tree_leaves(values))


def describe_line(error: Exception) -> str:
    """Return the line of the model's code that raised an error, as "task.py line 3: `…`"."""
    own_code = (str(Path(torch.__file__).parent), __file__)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(own_code)]
    return f"{Path(frames[-1].filename).name} line {frames[-1].lineno}: `{frames[-1].line}`"


def _written_tensors(function: OpOverload, args: Any, kwargs: Any) -> Iterator[Tensor]:
    """Yield the tensors that an operation changes in place."""
    schema = operator_schema(function)
    if schema.is_mutable:
        for index, argument in enumerate(schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                values = tree_leaves(args[index] if index < len(args) else kwargs.get(argument.name))
                yield from (value for value in values if isinstance(value, Tensor))


def _without_masks(indices: Iterable[Tensor | None]) -> Iterator[Tensor | None]:
    """Yield indices; a mask with values becomes the indices where it is true, whose number is known."""
    for index in indices:
        if index is None or isinstance(index, Placeholder) or index.dtype != torch.bool:
            yield index
        else:
            yield from index.nonzero(as_tuple=True)


def _to_meta(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _empty(value, _META)
    return _META if isinstance(value, torch.device) else value


def _empty(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the same shape, strides and type, with memory of its own."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
