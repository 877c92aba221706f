"""One run with its tensors bound to a device's memory: each input goes there once, the outputs come back once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnxruntime

Array = np.ndarray[Any, Any]


def suits(session: Any) -> bool:
    """Whether all tensors can be bound; ONNX Runtime binds no texts."""
    return all(node.type != "tensor(string)" for node in (*session.get_inputs(), *session.get_outputs()))


def run(session: Any, outputs: Sequence[str], inputs: Mapping[str, Array], device: str) -> list[Array]:
    """The outputs in their order. A binding of its own for each run, so that several threads may run at once."""
    bound = session.io_binding()
    for name, array in inputs.items():
        bound.bind_ortvalue_input(name, onnxruntime.OrtValue.ortvalue_from_numpy(array, device, 0))
    for name in outputs:  # without a shape: ONNX Runtime allocates it when it knows how large it is
        bound.bind_output(name, device, 0)
    try:
        session.run_with_iobinding(bound)
    except RuntimeError:  # of whatever kind it was: a plain run tells whether the values or we are to blame
        return list(session.run(list(outputs), dict(inputs)))
    return list(bound.copy_outputs_to_cpu())


def keep(
    session: Any, inputs: Mapping[str, Any], read: Sequence[str], kept: Sequence[str], device: str
) -> tuple[list[Array], list[Any]]:
    """One run that reads tensors of an earlier one: those `read` come as arrays, those `kept` stay on the device."""
    bound = session.io_binding()
    for name, value in inputs.items():
        if isinstance(value, np.ndarray):
            value = onnxruntime.OrtValue.ortvalue_from_numpy(value, device, 0)
        bound.bind_ortvalue_input(name, value)
    for name in read:
        bound.bind_output(name, "cpu", 0)
    for name in kept:
        bound.bind_output(name, device, 0)
    session.run_with_iobinding(bound)
    values = list(bound.get_outputs())
    return [value.numpy() for value in values[: len(read)]], values[len(read) :]
