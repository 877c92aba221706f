"""CUDA: page-locked memory for inputs, and graphs of runs with fixed shapes."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnxruntime

from pipeline.contract.codec import Array

log = logging.getLogger(__name__)


class PinnedMemory:
    """Page-locked host memory, from which a GPU copies directly: one buffer for each input. Not thread-safe."""

    def __init__(self) -> None:
        self._buffers: dict[str, tuple[Array, Any]] = {}  # with the owner of the memory
        self._is_available = True

    def copy(self, name: str, array: Array) -> Array:
        """Return the input in page-locked memory, valid until the next copy of this name; as it is if there is none."""
        buffer, _ = self._buffers.get(name, (None, None))
        if self._is_available and (buffer is None or buffer.nbytes < array.nbytes):
            buffer = self._allocate(name, array.nbytes)
        if not self._is_available or buffer is None:
            return array
        copied: Array = buffer[: array.nbytes].view(array.dtype).reshape(array.shape)
        np.copyto(copied, array)
        return copied

    def _allocate(self, name: str, size: int) -> Array | None:
        try:
            owner = onnxruntime.OrtValue.ortvalue_from_shape_and_type(
                [1 << max(0, size - 1).bit_length()], np.uint8, memory_info=pinned_memory_info()
            )
            buffer: Array = owner.numpy()
            if buffer.ctypes.data != owner.data_ptr():
                raise RuntimeError("ONNX Runtime returns a copy of it")
        except Exception as error:  # older versions have no `memory_info`; others raise a dozen types
            log.warning("inputs are not copied from page-locked memory: %s", " ".join(str(error).split()))
            self._is_available = False
            return None
        self._buffers[name] = buffer, owner
        return buffer


@functools.cache
def pinned_memory_info() -> Any:
    """Register ONNX Runtime's allocator of page-locked memory, once for all sessions, and return its name."""
    info = onnxruntime.OrtMemoryInfo(
        "CudaPinned", onnxruntime.OrtAllocatorType.ORT_DEVICE_ALLOCATOR, 0, onnxruntime.OrtMemType.CPU_OUTPUT
    )
    onnxruntime.create_and_register_allocator_v2("CUDAExecutionProvider", info, {}, onnxruntime.OrtArenaCfg({}))
    return info


def graph_options(number: int) -> Any:
    """Return the options of a run that captures or replays a graph; -1: neither, 0 is ONNX Runtime's own."""
    options = onnxruntime.RunOptions()
    options.add_run_config_entry("gpu_graph_id", str(number))
    return options


@dataclass(frozen=True)
class Graph:
    inputs: Mapping[str, Any]  # OrtValues at the addresses that the graph reads
    binding: Any
    options: Any


class CudaGraphs:
    """CUDA graphs of one session, by the shapes of their inputs. All runs must be in the thread that captures.

    ONNX Runtime keeps the graphs of each thread, and forbids to run a session with graphs twice at the same time.
    """

    def __init__(self, session: Any, device: str) -> None:
        self._session, self._device = session, device
        self._inputs = [node.name for node in session.get_inputs()]
        self._outputs = [node.name for node in session.get_outputs()]
        self._graphs: dict[tuple[tuple[int, ...], ...], Graph] = {}

    def capture(self, inputs: Mapping[str, Array], outputs: Sequence[Array]) -> None:
        """Capture the run of a batch; `outputs` are those of an ordinary run, in the model's order."""
        values = {name: self._on_device(inputs[name]) for name in self._inputs}
        binding = self._session.io_binding()
        for name, value in values.items():
            binding.bind_ortvalue_input(name, value)
        for name, output in zip(self._outputs, outputs, strict=True):
            binding.bind_ortvalue_output(name, self._on_device(output))
        graph = Graph(values, binding, graph_options(len(self._graphs) + 1))
        self._session.run_with_iobinding(binding, graph.options)
        self._graphs[self._key(inputs)] = graph

    def run(self, names: Sequence[str], inputs: Mapping[str, Array], pinned: PinnedMemory | None) -> list[Array] | None:
        """Replay the graph for these shapes and return the named outputs; None if there is no such graph."""
        graph = self._graphs.get(self._key(inputs))
        if graph is None:
            return None
        for name, value in graph.inputs.items():
            value.update_inplace(pinned.copy(name, inputs[name]) if pinned else inputs[name])
        self._session.run_with_iobinding(graph.binding, graph.options)
        outputs = dict(zip(self._outputs, graph.binding.copy_outputs_to_cpu(), strict=True))
        return [outputs[name] for name in names]

    def _key(self, inputs: Mapping[str, Array]) -> tuple[tuple[int, ...], ...]:
        return tuple(inputs[name].shape for name in self._inputs)

    def _on_device(self, array: Array) -> Any:
        return onnxruntime.OrtValue.ortvalue_from_numpy(np.array(array), self._device, 0)
