"""Why a file is not the model: the first wrong node, or the module that was traced as another than it is.

The exporter keeps the names of torch's own trace, so that the trace, run step by step, says what each tensor of the
file should hold; and the trace says of each step which module it comes from, whose answer torch knows too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.fx import Interpreter, Node
from torch.utils import _pytree as pytree

from export.bisect import error_of, first_wrong_of
from export.convert import Written
from export.graph import Graph
from export.trace import inner, owner, place
from pipeline.spec.errors import StageError
from pipeline.spec.exporting import Export

Array = np.ndarray[Any, Any]
Feed = Mapping[str, Array]


@dataclass(frozen=True)
class Step:
    """One operator of the trace, and what it answered."""

    node: Node
    value: Array

    @property
    def where(self) -> str:
        return f"{owner(self.node)}{place(self.node)}"


def blame(written: Written, path: Path, feeds: Iterable[Feed], config: Export) -> str:
    """One clause, of the first feed that shows a fault; nothing where none does, or where torch kept no trace."""
    if written.program is None:
        return written.limits
    for feed in feeds:
        try:
            found = _of_feed(written, path, feed, config)
        except (RuntimeError, AssertionError, StageError) as error:  # a shape that torch or the file itself refuses
            print(f"where the file is wrong is not looked for at {_shapes(feed)}: {' '.join(str(error).split())[:160]}")
            continue
        if found:
            return "; ".join(filter(None, (found, written.limits)))
    return written.limits


def _of_feed(written: Written, path: Path, feed: Feed, config: Export) -> str:
    steps = steps_of(written, feed)
    found = first_wrong_of({name: step.value for name, step in steps.items()}, path, feed, config.rtol, config.atol)
    if found is None:
        return _of_trace(written, steps, feed, config)
    graph = Graph(path)
    node = next(one for one in graph.nodes if found.node in (one.name, *one.output))
    made = next((steps[name] for name in node.output if name in steps), None)
    return f"{found}" + (f", of {made.where}" if made else "")


@torch.no_grad()
def steps_of(written: Written, feed: Feed) -> dict[str, Step]:
    """By the names of the file's tensors; outputs by those they were given."""
    assert written.program is not None
    recorder = _Recorder(written.program.module())
    recorder.run(*_arguments(written, feed))
    last = next(node for node in written.program.graph.nodes if node.op == "output")
    names = [node.name for node in last.args[0] if isinstance(node, Node)]
    renamed = dict(zip(names, written.traced.outputs, strict=False))
    found = dict(recorder.steps)
    return found | {given: found[name] for name, given in renamed.items() if name in found}


class _Recorder(Interpreter):
    """Keeps what every step answered; sizes that torch would guard are what this run is about, and are let through."""

    def __init__(self, module: torch.fx.GraphModule) -> None:
        super().__init__(module)
        self.steps: dict[str, Step] = {}

    def run_node(self, n: Node) -> Any:
        if n.op == "call_module" and "guards" in str(n.target):
            return None
        value = super().run_node(n)
        if isinstance(value, Tensor) and n.op == "call_function":
            self.steps[n.name] = Step(n, _array(value))
        return value


def _of_trace(written: Written, steps: Mapping[str, Step], feed: Feed, config: Export) -> str:
    """The file is the trace; is the trace the model?"""
    expected = _answers(written, feed)
    traced = _traced_answers(steps)
    untold: list[str] = []  # modules since the last right one of which the trace has no step, as if they did nothing
    for name, value in expected.items():
        error = error_of(value, traced[name].value, config.rtol, config.atol) if name in traced else None
        if error is None:
            untold.append(name)
        elif error == 0:
            untold = []
        else:
            where = inner(untold[0] if untold else name)
            return (
                "the file is what torch traced, but the trace is not the model: it answers otherwise in "
                f"{f'`{where}`' if where else 'the model itself'}, off by {error:.3g}, so that python code goes "
                "another way while it is traced"
            )
    return ""


@torch.no_grad()
def _answers(written: Written, feed: Feed) -> dict[str, Array]:
    """Of every module that is called once and answers one tensor, in the order in which they are done."""
    found: dict[str, list[Any]] = {}

    def keep(name: str) -> Any:
        return lambda _module, _given, answer: found.setdefault(name, []).append(_single(answer))

    module: nn.Module = written.traced.module
    hooks = [part.register_forward_hook(keep(name)) for name, part in module.named_modules()]
    try:
        module(*_arguments(written, feed))
    finally:
        for hook in hooks:
            hook.remove()
    return {name: each[0] for name, each in found.items() if len(each) == 1 and each[0] is not None}


def _traced_answers(steps: Mapping[str, Step]) -> dict[str, Step]:
    """The last step of each module is its answer."""
    found: dict[str, Step] = {}
    for step in steps.values():
        for entry in (step.node.meta.get("nn_module_stack") or {}).values():
            found[entry[0]] = step
    return found


def _single(answer: Any) -> Array | None:
    answer = answer[0] if isinstance(answer, tuple) and len(answer) == 1 else answer
    return _array(answer) if isinstance(answer, Tensor) else None


def _arguments(written: Written, feed: Feed) -> tuple[Any, ...]:
    """The feed, nested as the module takes it; a copy, so that nothing is written into it."""
    tensors = [torch.from_numpy(np.array(feed[name])) for name in written.traced.inputs]
    spec = pytree.tree_flatten(written.traced.arguments)[1]
    found: tuple[Any, ...] = pytree.tree_unflatten(tensors, spec)
    return found


def _array(tensor: Tensor) -> Array:
    tensor = tensor.detach()
    found: Array = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).cpu().numpy().copy()
    return found


def _shapes(feed: Feed) -> str:
    return ", ".join(f"{name} {list(array.shape)}" for name, array in feed.items())
