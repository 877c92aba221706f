"""Translate operators that torch.onnx lacks, as recurrent layers and the grouped products of experts, or has wrong.

A mixture of experts becomes a loop over the experts that received tokens: ONNX has no operator for the grouped product
of `transformers` (`grouped_mm`), and its `batched_mm` copies the weights of every token's experts, which at 512 tokens
takes hundreds of times the memory and over ten times the time (benchmarks/RESULTS.md).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import onnxscript
import torch
from onnxscript import FLOAT, INT32
from onnxscript import opset18 as op  # what torch translates to, before it converts to the requested opset
from torch import nn

GROUPED = "grouped_mm"
_EXPERTS_SETTING = "_experts_implementation"


@onnxscript.script()  # type: ignore[untyped-decorator]
def grouped_mm(rows: FLOAT, weight: FLOAT, ends: INT32) -> FLOAT:
    """Multiply rows [pairs, wide], sorted by expert, by weights [experts, wide, narrow]; ends[e] ends expert e's rows.

    The loop skips experts without rows.
    """
    zero = op.Constant(value_ints=[0])
    stops = op.Cast(ends, to=7)
    starts = op.Concat(zero, op.Slice(stops, zero, op.Constant(value_ints=[-1])), axis=0)
    used_experts = op.Squeeze(op.NonZero(op.Sub(stops, starts)), zero)
    # Without any row, the result still has a width.
    width = op.Slice(op.Shape(weight), op.Constant(value_ints=[2]), op.Constant(value_ints=[3]))
    outputs = op.SequenceConstruct(op.CastLike(op.ConstantOfShape(op.Concat(zero, width, axis=0)), rows))
    for index in range(op.Size(used_experts)):
        expert = op.Gather(used_experts, op.Unsqueeze(index, zero))
        expert_rows = op.Slice(rows, op.Gather(starts, expert), op.Gather(stops, expert))
        outputs = op.SequenceInsert(outputs, op.MatMul(expert_rows, op.Squeeze(op.Gather(weight, expert), zero)))
    return op.ConcatFromSequence(outputs, axis=0)


def _recurrent(activation: str) -> Callable[..., Any]:
    """Return the translation of nn.RNN, which torch.onnx lacks: without it, the trace has as many steps as the data."""

    def translate(
        input: FLOAT,  # noqa: A002  (the argument's name in torch)
        hx: FLOAT,
        params: Sequence[FLOAT],
        has_biases: bool,
        num_layers: int,
        dropout: float,  # noqa: ARG001  (in evaluation nothing is dropped)
        train: bool,  # noqa: ARG001
        bidirectional: bool,
        batch_first: bool,
    ) -> tuple[FLOAT, FLOAT]:
        directions, of_direction = (2 if bidirectional else 1), (4 if has_biases else 2)
        values, states = (op.Transpose(input, perm=[1, 0, 2]) if batch_first else input), []
        for layer in range(num_layers):
            start = layer * directions * of_direction
            weights = [params[start + each * of_direction :][:of_direction] for each in range(directions)]
            w, r = (op.Concat(*(op.Unsqueeze(each[i], [0]) for each in weights), axis=0) for i in (0, 1))
            biases = [op.Unsqueeze(op.Concat(each[2], each[3], axis=0), [0]) for each in weights if has_biases]
            outputs, state = op.RNN(
                values, w, r, op.Concat(*biases, axis=0) if biases else None, None,
                op.Slice(hx, [layer * directions], [(layer + 1) * directions], [0]),
                direction="bidirectional" if bidirectional else "forward",
                hidden_size=hx.shape[2], activations=[activation] * directions,
            )  # fmt: skip
            # [length, directions, batch, width] → [length, batch, directions × width]
            values = op.Reshape(op.Transpose(outputs, perm=[0, 2, 1, 3]), [0, 0, -1])
            states.append(state)
        outputs = op.Transpose(values, perm=[1, 0, 2]) if batch_first else values
        return outputs, op.Concat(*states, axis=0)

    return translate


def _squeeze(values: Any) -> Any:
    """Remove the axes that always have one value; that of torch.onnx also removes the batch's where it has one row."""
    return op.Squeeze(values, [axis for axis, size in enumerate(values.shape) if size == 1])


def translations() -> dict[Callable[..., Any], Any]:
    """Return the translations for `torch.onnx.export`; `transformers` registers its operator when it is imported."""
    table: dict[Callable[..., Any], Any] = {
        torch.ops.aten.rnn_tanh.input: _recurrent("Tanh"),
        torch.ops.aten.rnn_relu.input: _recurrent("Relu"),
        torch.ops.aten.squeeze.default: _squeeze,
    }
    if "transformers.integrations.moe" in sys.modules:
        table[torch.ops.transformers.grouped_mm_fallback.default] = grouped_mm
    return table


@contextmanager
def unparsed_functions() -> Iterator[None]:
    """Let torch.onnx collect its 500 translations without parsing each, half of the time that a small export takes.

    It reads only the domain of `function_ir`.
    """
    parsed = onnxscript.TracedOnnxFunction.function_ir
    onnxscript.TracedOnnxFunction.function_ir = property(lambda function: SimpleNamespace(domain=function.opset.domain))
    try:
        yield
    finally:
        onnxscript.TracedOnnxFunction.function_ir = parsed


@contextmanager
def grouped_experts(model: nn.Module) -> Iterator[None]:
    """Use the expert implementation that has a translation within the context, and restore the previous one."""
    configs = [
        module.config for module in model.modules() if hasattr(getattr(module, "config", None), _EXPERTS_SETTING)
    ]
    implementations = [getattr(config, _EXPERTS_SETTING) for config in configs]
    try:
        for config in configs:
            if getattr(config, _EXPERTS_SETTING) is not None:
                setattr(config, _EXPERTS_SETTING, GROUPED)
        yield
    finally:
        for config, name in zip(configs, implementations, strict=True):
            setattr(config, _EXPERTS_SETTING, name)
