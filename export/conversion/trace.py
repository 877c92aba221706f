"""Trace the model with torch.export and find what an ONNX graph cannot express.

Reports, with a way to fix each: lengths that Python reads, state that changes with every call, functional dropout, and
values that the graph would keep as constants.
"""

from __future__ import annotations

import copy
import re
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from export.conversion.shapes import MODEL_ERRORS
from pipeline.contract.data import standard_attention
from pipeline.contract.run import describe
from pipeline.system.errors import StageError
from pipeline.system.torch_private import (
    OpOverload,
    SymNode,
    TorchDispatchMode,
    decompositions,
    forget_dispatch,
    operator_schema,
    sizes_without_special_cases,
    tensor_version,
    tree_flatten,
    tree_unflatten,
)

_LIBRARIES = ("/site-packages/", "/dist-packages/", "/torch/", "<frozen")


@dataclass(frozen=True)
class ExportInput:
    """A module, its example arguments, and the names of its tensors and their axes."""

    module: nn.Module
    arguments: tuple[Any, ...]
    inputs: Sequence[str]
    outputs: Sequence[str]
    axes: tuple[Any, ...]  # nested as the arguments are

    def nest(self, feed: Mapping[str, np.ndarray[Any, Any]]) -> tuple[Any, ...]:
        """Return a copy of the feed, nested as the module takes it."""
        tensors = [torch.from_numpy(np.array(feed[name])) for name in self.inputs]
        arguments: tuple[Any, ...] = tree_unflatten(tensors, tree_flatten(self.arguments)[1])
        return arguments


@dataclass(frozen=True)
class Trace:
    """The result of tracing; `program` is None if torch.export failed, and torch.onnx tries other ways."""

    program: torch.export.ExportedProgram | None
    is_final: bool = False  # torch.onnx would trace the model in the same way, or in a worse one


def trace(source: ExportInput) -> Trace:
    """Trace with torch.export; refuse a Python branch on data and an operator without a fake implementation."""
    with suppress(Exception), sizes_without_special_cases():  # as torch.onnx does; other errors are reported without it
        return Trace(_export_program(source, strict=False), is_final=True)
    try:
        return Trace(_export_program(source, strict=False))
    except Exception as error:  # torch raises its own types and any that the model raises
        _refuse_packing(source, error)
        _refuse_branch(error)
        _refuse_unknown_operator(error)
    try:  # from the bytecode of forward: when it runs, Python makes `len(x)` a number that is the same for all batches
        return Trace(_export_program(source, strict=True), is_final=True)
    except Exception:  # the first error was the better one
        return Trace(None)


def _export_program(source: ExportInput, strict: bool) -> torch.export.ExportedProgram:
    with warnings.catch_warnings(), torch.no_grad(), recurrent_shapes(), standard_attention():
        warnings.simplefilter("ignore")
        axes = _dynamic_shapes(source.axes)
        return torch.export.export(source.module, source.arguments, dynamic_shapes=axes, strict=strict)


def _dynamic_shapes(axes: Any) -> Any:
    """Return the axes as torch.export takes them; torch.onnx also takes names."""
    if isinstance(axes, str):
        return torch.export.Dim.DYNAMIC
    if isinstance(axes, dict):
        return {key: _dynamic_shapes(value) for key, value in axes.items()}
    return type(axes)(_dynamic_shapes(value) for value in axes) if isinstance(axes, list | tuple) else axes


@contextmanager
def recurrent_shapes() -> Iterator[None]:
    """Give GRU, LSTM and RNN their shapes without computing them step by step, which would fix the length of the trace.

    torch.onnx does so in its own trace only, and not in the passes after it.
    """
    saved = {}
    aten = torch.ops.aten
    for operator in (aten.gru.input, aten.lstm.input, aten.rnn_tanh.input, aten.rnn_relu.input):
        saved[operator] = (dict(operator.py_kernels), decompositions()[operator])
        operator.py_kernels.update(dict.fromkeys(operator.py_kernels, _recurrent_outputs))
        decompositions()[operator] = _recurrent_outputs
        forget_dispatch(operator)
    try:
        yield
    finally:
        for operator, (kernels, decomposition) in saved.items():
            operator.py_kernels.update(kernels)
            decompositions()[operator] = decomposition
            forget_dispatch(operator)


def _recurrent_outputs(
    values: Tensor,
    states: Any,
    _weights: Any,
    _has_biases: bool,
    _layers: int,
    _dropout: float,
    _train: bool,
    bidirectional: bool,
    _batch_first: bool,
) -> tuple[Tensor, ...]:
    """Return empty outputs of the right shapes: of all positions, and of each state (LSTM has two)."""
    states = (states,) if isinstance(states, Tensor) else tuple(states)
    width = states[0].shape[-1] * (2 if bidirectional else 1)
    return values.new_empty(*values.shape[:-1], width), *(torch.empty_like(state) for state in states)


def describe_module(node: torch.fx.Node) -> str:
    """Return the name and class of the module whose code called an operator."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path, kind = stack[-1] if stack else ("", "")
    kind = kind if isinstance(kind, str) else kind.__name__
    return f"`{module_name(path)}` ({kind.rpartition('.')[2]})" if module_name(path) else "the model's own forward"


def module_name(path: str) -> str:
    """Return a module's name in the user's model, which the export wraps as `model`."""
    return re.sub(r"^model(\.|$)", "", path)


def source_location(node: torch.fx.Node) -> str:
    """Return ", FILE line NUMBER" of the user's code; empty if the trace does not have it."""
    lines = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    user_lines = [(file, line) for file, line in lines if _is_users(file)]
    return f", {Path(user_lines[-1][0]).name} line {user_lines[-1][1]}" if user_lines else ""


class _OperatorFinder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Finds the user's first line that calls one of some operators."""

    supports_higher_order_operators = True  # such as torch.cond

    def __init__(self, wanted: set[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.line: str = ""
        self._wanted = wanted

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.line and self._wanted.intersection((func, *getattr(func, "tags", ()))):
            self.line = _describe_line(traceback.extract_stack()) or " "
        return func(*args, **(kwargs or {}))


def find_operator(module: nn.Module, arguments: Sequence[Any], *wanted: Any) -> str:
    """Return the user's line that calls one of the operators, given by themselves or by a tag; empty without a call."""
    finder = _OperatorFinder(set(wanted))
    with torch.no_grad(), finder:
        module(*copy.deepcopy(arguments))
    return finder.line


def find_python_length(source: ExportInput) -> str:
    """Return the user's line at which Python compares a length, or counts to it; empty if there is none."""
    lines, count, decide = list[str](), SymNode.guard_int, SymNode.guard_bool

    def note_count(*arguments: Any) -> int:
        lines.append(_describe_line(traceback.extract_stack()))
        return count(*arguments)

    def note_decision(*arguments: Any) -> bool:
        lines.append(_describe_line(traceback.extract_stack()[-4:-3]))  # torch itself compares lengths, too
        return decide(*arguments)

    try:
        SymNode.guard_int, SymNode.guard_bool = note_count, note_decision  # type: ignore[assignment, method-assign]
        with suppress(Exception):
            _export_program(source, strict=False)
    finally:
        SymNode.guard_int, SymNode.guard_bool = count, decide  # type: ignore[method-assign]
    return next(filter(None, lines), "")


def _refuse_packing(source: ExportInput, error: BaseException) -> None:
    if line := find_operator(source.module, source.arguments, torch.ops.aten._pack_padded_sequence.default):
        raise StageError(
            f"the model packs sequences by their lengths{line.rstrip()}, and a graph cannot do that; give the "
            "layer the padded texts, and a second layer for the other direction the texts reversed within their lengths"
        ) from error


def _describe_line(frames: Sequence[traceback.FrameSummary]) -> str:
    """Return the last line of the user's code, as " (task.py line 3: `…`)"; empty if there is none."""
    user_frames = [frame for frame in frames if _is_users(frame.filename)]
    if not user_frames:
        return ""
    return f" ({Path(user_frames[-1].filename).name} line {user_frames[-1].lineno}: `{user_frames[-1].line}`)"


def _refuse_branch(error: BaseException) -> None:
    if not any(type(cause).__name__ == "GuardOnDataDependentSymNode" for cause in _chain(error)):
        return
    frames = [frame for cause in _chain(error) for frame in traceback.extract_tb(cause.__traceback__)]
    if argument := _causal_argument(frames):
        raise StageError(
            f"torch examines the values of a mask to find out whether it is causal{_describe_line(frames)}, which a "
            f"graph cannot; give it {argument}=True if the mask is causal, and {argument}=False otherwise"
        ) from error
    raise StageError(
        f"the model decides in python by what its data are{_describe_line(frames)}, and a graph would keep one side of "
        "it for all; write it with torch.where, or with torch.cond where only one side may run"
    ) from error


def _causal_argument(frames: Sequence[traceback.FrameSummary]) -> str:
    """Return the argument without which one of torch's transformer layers examines its mask; empty if none did."""
    lines = [frame.line or "" for frame in frames if frame.filename.endswith("torch/nn/modules/transformer.py")]
    callers = [line for line in lines if "is_causal = _detect_is_causal_mask(" in line]
    if not callers:
        return ""
    if "tgt_is_causal" in callers[0]:
        return "tgt_is_causal"
    # nn.Transformer has its own name for it.
    return "src_is_causal" if any("self.encoder(" in line for line in lines) else "is_causal"


def _refuse_unknown_operator(error: BaseException) -> None:
    match = re.search(r"no fake impl registered for <CustomOpDef\(([^)]+)\)>", str(error))
    if match:
        raise StageError(
            f"the model calls the custom operator {match[1]}, which can only be run, not traced; write it with torch's "
            "own operators: ONNX Runtime would not have it either"
        ) from error


def explain_failure(source: ExportInput, error: BaseException) -> str:
    """Return why torch.onnx did not write the model: which line it cannot translate, or torch's own words."""
    match = re.search(r"No ONNX function found for <OpOverload\(op='([^.']+)\.([^']+)'", str(error))
    if match:
        frames = (frame for cause in _chain(error) for frame, _ in traceback.walk_tb(cause.__traceback__))
        calls = (node for frame in frames if isinstance(node := frame.f_locals.get("node"), torch.fx.Node))
        location = next((f" in {describe_module(node)}{source_location(node)}" for node in calls), "")
        operator = f"{match[1]}::{match[2]}{location}"
        return f"the model calls {operator}, which has no form in ONNX; write it with torch's other operators"
    if line := find_python_length(source):
        return (
            f"the model counts to a length in python{line}, and a graph would count as for the traced input; compute "
            "all at once, or with nn.GRU, nn.LSTM or nn.RNN"
        )
    while error.__cause__ is not None:
        error = error.__cause__
    reason = " ".join(str(error).split())[:400]
    return f"the model does not export to ONNX (docs/model-does-not-export.md): {reason}"


def _is_users(file: str) -> bool:
    return Path(__file__).parents[1] not in Path(file).parents and not any(part in file for part in _LIBRARIES)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


_TRAINING = ("train", "training")
_PROBABILITIES = ("p", "dropout_p", "dropout")  # of dropping a value


def inspect(source: ExportInput) -> Trace:
    """Refuse what a graph cannot express, and return the trace, which costs little compared with the ONNX export."""
    check_state(source)
    result = trace(source)
    if result.program is not None:
        check_operators(result.program)
    return result


def check_operators(program: torch.export.ExportedProgram) -> None:
    """Refuse operators that behave at inference as in training."""
    for node in program.graph.nodes:
        if not isinstance(node.target, OpOverload):
            continue
        name = operator_schema(node.target).name.removeprefix("aten::")
        location = f"{describe_module(node)}{source_location(node)}"
        if ("dropout" in name and _is_on(node)) or ("attention" in name and _arguments(node).get("dropout_p")):
            raise StageError(
                f"{location}: dropout stays on in eval mode, so that every answer is another; give it "
                "training=self.training, or use nn.Dropout"
            )
        if (
            "batch_norm" in name and _is_on(node) and _reads_inputs(node, program)
        ):  # and not weights, to standardize them
            raise StageError(
                f"{location}: batch normalisation by the current batch, so the output depends on the "
                "rest of the batch; build it with track_running_stats=True, or give F.batch_norm training=self.training"
            )


@torch.no_grad()
def check_state(source: ExportInput) -> None:
    """Check that a call changes no buffers, parameters or inputs, but for tables that the first one makes."""
    numbers = numeric_attributes(source.module)
    arguments = copy.deepcopy(source.arguments)
    try:
        outputs, changed = _call(source.module, arguments)
    except MODEL_ERRORS as error:
        given = zip(source.inputs, _tensors(arguments), strict=True)
        text = ", ".join(f"{name} {str(value.dtype)[6:]}{list(value.shape)}" for name, value in given)
        raise StageError(f"the model fails for inputs {text}: {describe(error, Path.cwd())}") from error
    _refuse_call_counter(source, numbers, outputs)
    if changed and not source.module.state_dict().keys() & {*changed}:
        _, changed = _call(source.module, copy.deepcopy(source.arguments))
    if changed:
        raise StageError(
            f"the model changes {', '.join(f'`{module_name(name)}`' for name in changed[:4])} with every call, and a "
            "served graph keeps nothing between requests; change it only if self.training, or make it an input and an "
            "output"
        )
    pairs = zip(source.inputs, _tensors(arguments), _tensors(source.arguments), strict=True)
    if changed_inputs := [name for name, left, right in pairs if not is_equal(left, right)]:
        raise StageError(
            f"the model changes its input {', '.join(f'`{name}`' for name in changed_inputs)} in place; work on a "
            "copy, as in `x = x.clone()`"
        )


def _call(module: nn.Module, arguments: Any) -> tuple[Any, list[str]]:
    """Return the outputs, and the names of buffers and parameters that the call changed."""
    buffers_before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    versions = {name: tensor_version(parameter) for name, parameter in module.named_parameters()}
    outputs = module(*arguments)
    buffers, parameters = dict(module.named_buffers()), dict(module.named_parameters())
    changed = [name for name, value in buffers_before.items() if not is_equal(value, buffers.get(name))]
    return outputs, changed + [name for name, it in parameters.items() if tensor_version(it) != versions.get(name)]


def _refuse_call_counter(source: ExportInput, numbers_before: dict[str, Any], first_outputs: Any) -> None:
    """Refuse a number that every call changes, if the outputs depend on it: in a graph it is a constant."""
    numbers_after = numeric_attributes(source.module)
    if not (changed := sorted(name for name, value in numbers_after.items() if numbers_before.get(name) != value)):
        return
    names = ", ".join(f"`{name}`" for name in changed[:4])
    second_outputs = source.module(*copy.deepcopy(source.arguments))
    pairs = zip(_tensors(first_outputs), _tensors(second_outputs), strict=True)
    if any(not is_equal(first, second) for first, second in pairs):
        raise StageError(
            f"the model counts its calls: {names} changes with each, and the answer with it, while a graph has it as a "
            "constant; count only if self.training, or make it an input"
        )
    print(f"the model changes {names} with every call; in the graph it is a constant, which no answer hung on here")


def numeric_attributes(module: nn.Module) -> dict[str, Any]:
    """Return the Python numbers that modules keep as attributes; in a graph they are constants."""
    return {
        f"{module_name(path)}.{name}".lstrip("."): value
        for path, child in module.named_modules()
        for name, value in vars(child).items()
        if isinstance(value, int | float) and not name.startswith("_")
    }


def _is_on(node: torch.fx.Node) -> bool:
    """Return whether the call is in training mode and, if it has a probability, drops anything."""
    arguments = _arguments(node)
    if not any(arguments.get(name) for name in _TRAINING):
        return False
    return all(arguments[name] for name in _PROBABILITIES if name in arguments)


def _reads_inputs(node: torch.fx.Node, program: torch.export.ExportedProgram) -> bool:
    """Return whether the first argument of a call depends on an input of the model, and not on weights alone."""
    sources = [node.all_input_nodes[0]]
    for source in sources:  # which grows
        sources += [earlier for earlier in source.all_input_nodes if earlier not in sources]
    return any(source.name in program.graph_signature.user_inputs for source in sources)


def _arguments(node: torch.fx.Node) -> dict[str, Any]:
    assert isinstance(node.target, OpOverload)
    defaults = {argument.name: argument.default_value for argument in operator_schema(node.target).arguments}
    return {**defaults, **dict(zip(defaults, node.args, strict=False)), **node.kwargs}


def is_equal(left: Tensor, right: Tensor | None) -> bool:
    if right is None or left.shape != right.shape or left.dtype != right.dtype:
        return False
    return bool(torch.isclose(left, right, rtol=0, atol=0, equal_nan=True).all())


def _tensors(arguments: Any) -> Iterator[Tensor]:
    for value in (arguments,) if isinstance(arguments, Tensor) else arguments:
        if isinstance(value, Tensor):
            yield value
        else:
            yield from _tensors(value)
