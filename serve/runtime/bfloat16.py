"""BF16 tensors: two bytes on the wire and in the model, float32 in between, since numpy has no such type."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnxruntime

from pipeline.contract.codec import Array

_TYPE = "tensor(bfloat16)"
_ONNX_BFLOAT16 = 16  # onnx.TensorProto.BFLOAT16; onnx itself is not needed to serve


def from_bits(bits: Array) -> Array:
    """Return the values of 16-bit patterns."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_bits(array: Array) -> Array:
    """Round float32 to the nearest BF16 (ties to even) and return 16-bit patterns; too large values become infinity."""
    whole = np.asarray(array, np.float32, order="C").view(np.uint32)
    nearest = (whole + (((whole >> 16) & 1) + 0x7FFF)) >> 16
    quiet = (whole >> 16) | 0x40  # rounding could turn a NaN into infinity
    return np.where((whole & 0x7FFFFFFF) > 0x7F800000, quiet, nearest).astype(np.uint16)


def uses_bfloat16(session: Any) -> bool:
    """Return whether an input or output of the model is BF16."""
    return any(node.type == _TYPE for node in (*session.get_inputs(), *session.get_outputs()))


def run(session: Any, names: Sequence[str], inputs: Mapping[str, Array]) -> list[Array]:
    """Run a model with BF16 tensors, for which ONNX Runtime accepts OrtValues but no numpy arrays."""
    values = {node.name: _value(inputs[node.name], node.type) for node in session.get_inputs()}
    binding = session.io_binding()
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    for name in names:
        binding.bind_output(name, "cpu")
    try:
        session.run_with_iobinding(binding)
    except RuntimeError:  # a plain run raises the specific error
        session.run_with_ort_values(list(names), values)
        raise
    return [_array(value) for value in binding.get_outputs()]


def _value(array: Array, kind: str) -> Any:
    array = np.asarray(array, order="C")
    if kind != _TYPE:
        return onnxruntime.OrtValue.ortvalue_from_numpy(array)
    return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(to_bits(array), _ONNX_BFLOAT16)


def _array(value: Any) -> Array:
    if value.element_type() != _ONNX_BFLOAT16:
        array: Array = value.numpy()
        return array
    bits = np.frombuffer(ctypes.string_at(value.data_ptr(), value.tensor_size_in_bytes()), np.uint16)
    return from_bits(bits).reshape(value.shape())
