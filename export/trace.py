"""Trace the model with torch.export and find what an ONNX graph cannot express.

Reports, with a way to fix each: lengths the trace fixed, state that changes with every call, functional dropout, and
values that the graph would keep as constants.
"""

from __future__ import annotations

import copy
import re
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.contract.errors import StageError

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
        except Exception as error:  # torch raises its own types and any that the model raises
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
    named = [f"`{name or fixed}` {f'= {size}' if size else bounds}" for name, bounds, fixed, size in found]
    if not named:
        return ""
    return f"torch's guards limit the trace to {', '.join(named)}: the model compares a length in Python"


def _is_users(file: str) -> bool:
    return Path(file).parent != Path(__file__).parent and not any(part in file for part in _LIBRARIES)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


_TRAINING = ("train", "training")
_SHARES = ("p", "dropout_p", "dropout")  # how much is dropped


def inspect(traced: Traced) -> Trace:
    """Refuse what no graph can be; the trace that shows it is cheap beside the translation to ONNX."""
    check_state(traced)
    found = trace(traced)
    if found.program is not None:
        check_hidden(found.program)
    return found


def check_hidden(program: torch.export.ExportedProgram) -> None:
    """Operators that do at inference what only training should."""
    for node in program.graph.nodes:
        if not isinstance(node.target, torch._ops.OpOverload):
            continue
        name = node.target._schema.name.removeprefix("aten::")
        if ("dropout" in name and _is_on(node)) or ("attention" in name and _share(node, "dropout_p")):
            raise StageError(
                f"{owner(node)}{place(node)}: dropout stays on in eval mode, so that every answer is another; give it "
                "training=self.training, or use nn.Dropout"
            )
        if "batch_norm" in name and _is_on(node):
            raise StageError(
                f"{owner(node)}{place(node)}: batch normalisation by the current batch, so the output depends on the "
                "rest of the batch; build it with track_running_stats=True, or give F.batch_norm training=self.training"
            )


@torch.no_grad()
def check_state(traced: Traced) -> None:
    """One call leaves buffers, parameters and its inputs as they were."""
    module = traced.module
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    versions = {name: parameter._version for name, parameter in module.named_parameters()}
    numbers = numbers_of(module)
    given = copy.deepcopy(traced.arguments)
    first = module(*given)
    _refuse_counting(traced, numbers, first)
    after = dict(module.named_buffers())
    changed = [name for name, value in before.items() if not _same(value, after.get(name))]
    changed += [name for name, parameter in module.named_parameters() if parameter._version != versions.get(name)]
    if changed:
        raise StageError(
            f"the model changes {', '.join(f'`{inner(name)}`' for name in changed[:4])} with every call, and a served "
            "graph keeps nothing between requests; change it only if self.training, or make it an input and an output"
        )
    pairs = zip(traced.inputs, _tensors(given), _tensors(traced.arguments), strict=True)
    if touched := [name for name, left, right in pairs if not _same(left, right)]:
        raise StageError(
            f"the model changes its input {', '.join(f'`{name}`' for name in touched)} in place; work on a copy, as in "
            "`x = x.clone()`"
        )


def _refuse_counting(traced: Traced, before: dict[str, Any], first: Any) -> None:
    """A number that a call changes is a constant in a graph, which matters where the answer hangs on it."""
    after = numbers_of(traced.module)
    if not (moved := sorted(name for name, value in after.items() if before.get(name) != value)):
        return
    named = ", ".join(f"`{name}`" for name in moved[:4])
    second = traced.module(*copy.deepcopy(traced.arguments))
    if any(not _same(left, right) for left, right in zip(_tensors(first), _tensors(second), strict=True)):
        raise StageError(
            f"the model counts its calls: {named} changes with each, and the answer with it, while a graph has it as a "
            "constant; count only if self.training, or make it an input"
        )
    print(f"the model changes {named} with every call; in the graph it is a constant, which no answer hung on here")


def numbers_of(module: nn.Module) -> dict[str, Any]:
    """Plain numbers that modules keep as attributes; one that counts calls is a constant in a graph."""
    return {
        f"{inner(path)}.{name}".lstrip("."): value
        for path, part in module.named_modules()
        for name, value in vars(part).items()
        if isinstance(value, int | float) and not name.startswith("_")
    }


def _is_on(node: torch.fx.Node) -> bool:
    """Return whether the call is in training mode and, if it has a probability, drops anything."""
    known = _arguments(node)
    if not any(known.get(name) for name in _TRAINING):
        return False
    return all(known[name] for name in _SHARES if name in known)


def _share(node: torch.fx.Node, name: str) -> bool:
    return bool(_arguments(node).get(name))


def _arguments(node: torch.fx.Node) -> dict[str, Any]:
    assert isinstance(node.target, torch._ops.OpOverload)
    names = [argument.name for argument in node.target._schema.arguments]
    defaults = {argument.name: argument.default_value for argument in node.target._schema.arguments}
    return {**defaults, **dict(zip(names, node.args, strict=False)), **node.kwargs}


def _same(left: Tensor, right: Tensor | None) -> bool:
    if right is None or left.shape != right.shape or left.dtype != right.dtype:
        return False
    return bool(torch.isclose(left, right, rtol=0, atol=0, equal_nan=True).all())


def _tensors(arguments: Any) -> Iterator[Tensor]:
    for value in (arguments,) if isinstance(arguments, Tensor) else arguments:
        if isinstance(value, Tensor):
            yield value
        else:
            yield from _tensors(value)
