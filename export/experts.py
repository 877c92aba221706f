"""Mixture of experts in ONNX: a loop over the experts that were hit, each with its own tokens and no others.

`transformers` sorts tokens by expert and multiplies group by group (`grouped_mm`), for which ONNX has no operator. Its
`batched_mm`, which exports by itself, copies the weights of every token's experts: at 512 tokens that is hundreds of
times the memory and over ten times the time (bench/RESULTS.md).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import onnxscript
import torch
from onnxscript import FLOAT, INT32
from onnxscript import opset18 as op  # what torch translates to, before it converts to the opset that was asked for
from torch import nn

GROUPED = "grouped_mm"


@onnxscript.script()  # type: ignore[untyped-decorator]
def grouped_mm(rows: FLOAT, weight: FLOAT, ends: INT32) -> FLOAT:
    """Rows [pairs, wide] sorted by expert, weight [experts, wide, narrow]; expert e has the rows up to ends[e].

    Experts without a row cost nothing: there is no turn of the loop for them.
    """
    zero = op.Constant(value_ints=[0])
    stops = op.Cast(ends, to=7)
    starts = op.Concat(zero, op.Slice(stops, zero, op.Constant(value_ints=[-1])), axis=0)
    hit = op.Squeeze(op.NonZero(op.Sub(stops, starts)), zero)
    # No row at all still has a width.
    width = op.Slice(op.Shape(weight), op.Constant(value_ints=[2]), op.Constant(value_ints=[3]))
    found = op.SequenceConstruct(op.CastLike(op.ConstantOfShape(op.Concat(zero, width, axis=0)), rows))
    for turn in range(op.Size(hit)):
        expert = op.Gather(hit, op.Unsqueeze(turn, zero))
        own = op.Slice(rows, op.Gather(starts, expert), op.Gather(stops, expert))
        found = op.SequenceInsert(found, op.MatMul(own, op.Squeeze(op.Gather(weight, expert), zero)))
    return op.ConcatFromSequence(found, axis=0)


def translations() -> dict[Callable[..., Any], Any]:
    """For `torch.onnx.export`; `transformers` registers the operator once its models are imported."""
    if "transformers.integrations.moe" not in sys.modules:
        return {}
    return {torch.ops.transformers.grouped_mm_fallback.default: grouped_mm}


@contextmanager
def grouped_experts(model: nn.Module) -> Iterator[None]:
    """While a model is traced its experts are the implementation that is translated; then what they were again."""
    configs = [module.config for module in model.modules() if hasattr(getattr(module, "config", None), _NAME)]
    before = [getattr(config, _NAME) for config in configs]
    try:
        for config in configs:
            if getattr(config, _NAME) is not None:
                setattr(config, _NAME, GROUPED)
        yield
    finally:
        for config, name in zip(configs, before, strict=True):
            setattr(config, _NAME, name)


_NAME = "_experts_implementation"
