"""A model as torch.export sees it, before ONNX: what cannot be told of in a graph is told here, in words."""

from __future__ import annotations

import re
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pipeline.spec.errors import StageError

_LIBRARIES = ("/site-packages/", "/dist-packages/", "/torch/", "<frozen")


@dataclass(frozen=True)
class Traced:
    """A module, what it is traced with, and how its tensors and their axes are called."""

    module: nn.Module
    arguments: tuple[Any, ...]
    inputs: Sequence[str]
    outputs: Sequence[str]
    axes: tuple[Any, ...]  # nested as the arguments are


@dataclass(frozen=True)
class Trace:
    """`program` is None where torch.export alone does not manage; torch.onnx tries further ways."""

    program: torch.export.ExportedProgram | None
    limits: str  # sizes for which alone the trace holds, by torch's own guards


def trace(traced: Traced) -> Trace:
    """The graph with every operator as the model called it; a branch on data is refused."""
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        try:
            found = torch.export.export(traced.module, traced.arguments, dynamic_shapes=traced.axes, strict=False)
        except Exception as error:  # torch raises errors of its own, and any that the model's code does
            _refuse_branch(error)
            _refuse_unknown_operator(error)
            return Trace(None, _limits(str(error)))
    return Trace(found, "")


def owner(node: torch.fx.Node) -> str:
    """The module of the model whose code called an operator, and where."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path, kind = stack[-1] if stack else ("", "")
    kind = kind if isinstance(kind, str) else kind.__name__
    return f"`{inner(path)}` ({kind.rpartition('.')[2]})" if inner(path) else "the model's own forward"


def inner(path: str) -> str:
    """A module's name in the user's model, which is wrapped for the export as `model`."""
    return re.sub(r"^model(\.|$)", "", path)


def place(node: torch.fx.Node) -> str:
    """File and line of the user's code, with a comma before; nothing where the trace has kept none."""
    lines = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    own = [(file, line) for file, line in lines if _is_users(file)]
    return f", {Path(own[-1][0]).name} line {own[-1][1]}" if own else ""


def _refuse_branch(error: BaseException) -> None:
    if not any(type(one).__name__ == "GuardOnDataDependentSymNode" for one in _chain(error)):
        return
    frames = [frame for one in _chain(error) for frame in traceback.extract_tb(one.__traceback__)]
    own = [frame for frame in frames if _is_users(frame.filename)]
    where = f" ({Path(own[-1].filename).name} line {own[-1].lineno}: `{own[-1].line}`)" if own else ""
    raise StageError(
        f"the model decides in python by what its data are{where}, and a graph would keep one side of it for all; "
        "write it with torch.where, or with torch.cond where only one side may run"
    ) from error


def _refuse_unknown_operator(error: BaseException) -> None:
    found = re.search(r"no fake impl registered for <CustomOpDef\(([^)]+)\)>", str(error))
    if found:
        raise StageError(
            f"the model calls the custom operator {found[1]}, which can only be run, not traced; write it with torch's "
            "own operators: ONNX Runtime would not have it either"
        ) from error


def _limits(text: str) -> str:
    """Of torch's suggestion for an axis that its guards found to be bounded."""
    found = re.findall(r"(\w+) = Dim\('\w+', ([^)]*)\)|^\s*(\w+) = (\d+)\s*$", text, flags=re.MULTILINE)
    told = [f"`{name or fixed}` {f'= {size}' if size else bounds}" for name, bounds, fixed, size in found]
    if not told:
        return ""
    return f"torch's guards say that the trace holds for {', '.join(told)} alone: the model compares a length in python"


def _is_users(file: str) -> bool:
    return Path(file).parent != Path(__file__).parent and not any(part in file for part in _LIBRARIES)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
