"""Compare the tensors that the file stores with those of the checkpoint, one by one.

Outputs show nothing of a weight that no sample reaches, such as the row of a token that does not occur.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper
from torch import Tensor, nn

from export.checks.cases import to_array
from export.conversion.names import nested_graphs
from pipeline.contract.codec import Array
from pipeline.system.torch_private import BatchNormBase
from pipeline.system.wording import join_names

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_PREFIX = "model."  # of the module that the exporter wraps
_MIN_VALUES = 16  # of a tensor to be recognised by its values alone
_UNUSED = "num_batches_tracked"  # of batch norms, in training only
_JOINED_TOLERANCE = 1e-5
_NAMED = 3  # tensors that the log lists by name; parity.json has all


@dataclass(frozen=True)
class WeightsComparison:
    """Which tensors of the checkpoint are in the file with the same values, for parity.json."""

    equal: int = 0  # tensors that are in the file with their values
    matched: Mapping[str, str] = field(default_factory=dict)  # tensor → another name or form of it in the file
    not_compared: Sequence[str] = ()  # tensors that the file computes with in another form, or not at all
    constant: Sequence[str] = ()  # such tensors with one value throughout, such as zeros
    different: Sequence[str] = ()  # a sentence for each that has its name and other values

    @property
    def text(self) -> str:
        total = self.equal + len(self.constant) + len(self.not_compared) + len(self.different)
        if not total:
            return "the checkpoint has no tensors"
        sentence = f"{self.equal} of {total} tensors of the checkpoint are in the file with the same values"
        if self.constant:
            sentence += f"; {len(self.constant)} with one value throughout, such as zeros, are folded or shared"
        names = join_names([f"`{name}`" for name in self.not_compared], _NAMED)
        return f"{sentence}; compared by outputs only: {names}" if names else sentence


def compare_weights(path: Path, module: nn.Module) -> WeightsComparison:
    """Compare the file with a model's parameters and buffers."""
    model = onnx.load(path, load_external_data=False)
    tensors = {tensor.name: tensor for graph in nested_graphs(model.graph) for tensor in graph.initializer}
    state = {name: value for name, value in module.state_dict().items() if not name.endswith(_UNUSED)}
    equal, missing, different, matched = 0, list[str](), list[str](), dict[str, str]()
    for name, value in state.items():
        stored = _read(tensors[name], path) if name in tensors else None
        expected = _to_array(value)
        if stored is None or expected is None or stored.shape != expected.shape:
            missing.append(name)
        elif np.array_equal(stored, expected.astype(stored.dtype), equal_nan=stored.dtype.kind == "f"):
            equal += 1
        elif norm := _joined_norm(module, name, stored):
            matched |= dict.fromkeys((name, *_norm_tensors(name, norm)), f"joined: {name} with {norm}")
        else:
            changed = ~((stored == expected) | ((stored != stored) & (expected != expected)))
            different.append(
                f"{int(changed.sum()):,} of {changed.size:,} values of the weight `{name.removeprefix(_PREFIX)}` are "
                "others than in the checkpoint"
            )
    unnamed = [tensor for name, tensor in tensors.items() if name not in state]
    by_digest = dict(_digests(unnamed, path)) if missing else {}
    matched |= {name: place for name in missing if (place := _find(_to_array(state[name]), by_digest))}
    rest = {name.removeprefix(_PREFIX): _to_array(state[name]) for name in missing if name not in matched}
    constant = [name for name, array in rest.items() if array is not None and _has_one_value(array)]
    others = [name for name in rest if name not in constant]
    forms = {name.removeprefix(_PREFIX): place for name, place in matched.items() if name in state}
    return WeightsComparison(equal + len(forms), forms, tuple(others), tuple(constant), tuple(different))


def _has_one_value(array: Array) -> bool:
    return array.size > 1 and bool((array == array.flat[0]).all())


def _joined_norm(module: nn.Module, name: str, stored: Array) -> str:
    """Return the batch norm that the exporter multiplied into a weight or bias; empty if none gives these values."""
    owner, _, kind = name.rpartition(".")
    layer: Any = module.get_submodule(owner)
    if kind not in ("weight", "bias") or not isinstance(layer, (nn.Linear, *_CONVOLUTIONS, *_TRANSPOSED)):
        return ""
    channel = 1 if isinstance(layer, _TRANSPOSED) and kind == "weight" else 0
    expected = getattr(layer, kind).detach().double()
    norm: Any
    for norm_name, norm in module.named_modules():
        if not isinstance(norm, BatchNormBase) or norm.running_var is None or norm.running_mean is None:
            continue
        if len(norm.running_var) != expected.shape[channel]:
            continue
        factor = (norm.running_var.double() + norm.eps).rsqrt()
        factor = factor if norm.weight is None else factor * norm.weight.detach().double()
        if kind == "bias":
            joined = (expected - norm.running_mean.double()) * factor
            joined = joined if norm.bias is None else joined + norm.bias.detach().double()
        else:
            joined = expected * factor.reshape([-1 if axis == channel else 1 for axis in range(expected.ndim)])
        size = float(joined.abs().max())
        if np.allclose(stored, joined.numpy(), rtol=_JOINED_TOLERANCE, atol=_JOINED_TOLERANCE * size):
            return str(norm_name)
    return ""


def _norm_tensors(name: str, norm: str) -> tuple[str, ...]:
    """Return the tensors of a batch norm that a joined weight or bias holds."""
    parts = ("weight", "running_var") if name.endswith(".weight") else ("bias", "running_mean")
    return tuple(f"{norm}.{part}" for part in parts)


def _to_array(tensor: Tensor) -> Array | None:
    try:
        return to_array(tensor)
    except (TypeError, RuntimeError):  # quantized and sparse tensors
        return None


def _read(tensor: onnx.TensorProto, path: Path) -> Array:
    array = numpy_helper.to_array(tensor, base_dir=str(path.parent))
    return array if array.dtype.kind in "fiub" else array.astype(np.float32)


def _digests(tensors: Sequence[onnx.TensorProto], path: Path) -> Iterator[tuple[str, str]]:
    """Yield the digest of each tensor and of its transpose, with its name."""
    for tensor in tensors:
        array = _read(tensor, path)
        if array.size < _MIN_VALUES:
            continue
        yield _digest(array), tensor.name
        if array.ndim == 2:
            yield _digest(array.T), f"{tensor.name}, transposed"


def _digest(array: Array) -> str:
    """Return the digest of the values, whatever the shape: axes of size 1 come and go."""
    return hashlib.sha256(f"{array.dtype}".encode() + np.ascontiguousarray(array).tobytes()).hexdigest()


def _find(array: Array | None, by_digest: Mapping[str, str]) -> str:
    return "" if array is None or array.size < _MIN_VALUES else by_digest.get(_digest(array), "")
