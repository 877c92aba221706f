"""What a model eats and answers: names, types, shapes and limits, in the words of the Open Inference Protocol."""

from __future__ import annotations

from functools import cached_property
from typing import Any, Literal

import numpy as np
from pydantic import model_validator

from pipeline.spec.frozen import Frozen
from pipeline.spec.generation import Generation
from pipeline.spec.limits import Limits, Runtime

__all__ = ["NUMPY_TYPES", "Datatype", "Limits", "Runtime", "Signature", "TensorSpec"]

# The type of our arrays for each datatype. numpy has no bfloat16: its values are held as float32, which has them all.
NUMPY_TYPES: dict[str, Any] = {
    "BOOL": np.bool_,
    "UINT8": np.uint8,
    "UINT16": np.uint16,
    "UINT32": np.uint32,
    "UINT64": np.uint64,
    "INT8": np.int8,
    "INT16": np.int16,
    "INT32": np.int32,
    "INT64": np.int64,
    "FP16": np.float16,
    "FP32": np.float32,
    "FP64": np.float64,
    "BF16": np.float32,
    "BYTES": np.object_,
}
Datatype = Literal[
    "BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64",
    "FP16", "BF16", "FP32", "FP64", "BYTES",
]  # fmt: skip


class TensorSpec(Frozen):
    """One input or output; a string in the shape is a named dynamic axis."""

    name: str
    datatype: Datatype
    shape: tuple[int | str, ...]

    @property
    def protocol_shape(self) -> list[int]:
        """As the protocol's metadata says it: -1 for a dynamic axis."""
        return [axis if isinstance(axis, int) else -1 for axis in self.shape]


class Signature(Frozen):
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    codec: str  # class name in the bundle's codec.py
    requires: tuple[str, ...] = ()  # name==version of the packages the codec needs beside numpy
    limits: Limits
    runtime: Runtime
    generation: Generation | None = None  # what makes it a language model
    variant: str = "fp32"  # what the file was made of: the same tensors go in and come out of all of them

    @model_validator(mode="after")
    def _speaks_of_its_own_tensors(self) -> Signature:
        names = ({spec.name for spec in self.inputs}, {spec.name for spec in self.outputs})
        if self.generation and (absent := list(self.generation.absent(*names))):
            raise ValueError(f"generation names tensors that the graph does not have: {', '.join(absent)}")
        return self

    @cached_property
    def input_specs(self) -> dict[str, TensorSpec]:
        """By name: asked for at every request."""
        return {spec.name: spec for spec in self.inputs}

    @cached_property
    def fitting(self) -> set[tuple[tuple[int, ...], ...]]:
        """Shapes of all inputs together that were found to fit, kept by who serves: few, and asked again and again."""
        return set()

    @cached_property
    def output_names(self) -> tuple[str, ...]:
        return tuple(spec.name for spec in self.outputs)

    @property
    def why_alone(self) -> str:
        """Why several requests cannot be one batch; empty where every input and output has the same first axis."""
        if self.variant == "int8-dynamic":
            return "int8-dynamic rounds by the range of the whole batch: one client's values would coarsen another's"
        first = {spec.shape[:1] for spec in (*self.inputs, *self.outputs)}
        shared = len(first) == 1 and first != {()} and all(isinstance(axis, str) for shape in first for axis in shape)
        return "" if self.inputs and shared else "its inputs and outputs do not share a first axis"
