"""BF16: two bytes on the wire and in the model, float32 in between, because numpy has no such type."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnxruntime

Array = np.ndarray[Any, Any]

_TYPE = "tensor(bfloat16)"
_ONNX_BFLOAT16 = 16  # onnx.TensorProto.BFLOAT16; onnx itself is not needed to serve


def widened(bits: Array) -> Array:
    """The values of these 16-bit patterns, exactly."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_bits(array: Array) -> Array:
    """The nearest BF16 of each float32 (ties to even), as 16-bit patterns; beyond the largest it is infinity."""
    whole = np.asarray(array, np.float32, order="C").view(np.uint32)
    nearest = (whole + (((whole >> 16) & 1) + 0x7FFF)) >> 16
    quiet = (whole >> 16) | 0x40  # rounding could make an infinity of a NaN
    return np.where((whole & 0x7FFFFFFF) > 0x7F800000, quiet, nearest).astype(np.uint16)


def rounded(array: Array) -> Array:
    return widened(to_bits(array))


def concerns(session: Any) -> bool:
    """Whether the model has BF16 among its inputs or outputs."""
    return any(node.type == _TYPE for node in (*session.get_inputs(), *session.get_outputs()))


def run(session: Any, names: Sequence[str], inputs: Mapping[str, Array]) -> list[Array]:
    """`session.run` for such a model: ONNX Runtime refuses its arrays there, but takes and gives values of its own."""
    values = {node.name: _value(inputs[node.name], node.type) for node in session.get_inputs()}
    binding = session.io_binding()
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    for name in names:
        binding.bind_output(name, "cpu")
    try:
        session.run_with_iobinding(binding)
    except RuntimeError:  # of whatever kind it was: a plain run tells whether the values or we are to blame
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
        found: Array = value.numpy()
        return found
    bits = np.frombuffer(ctypes.string_at(value.data_ptr(), value.tensor_size_in_bytes()), np.uint16)
    return widened(bits).reshape(value.shape())
