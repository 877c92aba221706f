"""ONNX Runtime session of a bundle: provider, validation, runs with bound tensors, and where its nodes run."""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import onnxruntime
from onnxruntime.capi.onnxruntime_pybind11_state import InvalidArgument

from pipeline.contract.bundle import Bundle
from pipeline.contract.codec import Array
from pipeline.contract.signature import NUMPY_TYPES, TensorSpec
from pipeline.system.errors import BundleError, InvalidPayload, ResourceError
from pipeline.system.processes import cuda_problem
from serve.monitoring.logs import log_fields
from serve.runtime import bfloat16, tensorrt
from serve.runtime.cuda import CudaGraphs, PinnedMemory, graph_options
from serve.runtime.tensorrt import TENSORRT

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
T = TypeVar("T")
Provider = Literal["auto", "cpu", "cuda", "tensorrt"]

_ONNX_NAMES = {"FP32": "float", "FP64": "double", "BF16": "bfloat16", "BYTES": "string"}  # the others are numpy's
_DATATYPES = {f"tensor({_ONNX_NAMES.get(name, kind)})": name for name, kind in NUMPY_TYPES.items()}

log = logging.getLogger(__name__)


class Session:
    """A loaded model; `run` is thread-safe."""

    def __init__(self, bundle: Bundle, provider: Provider | None = None, threads: int | None = None) -> None:
        requested = provider or bundle.signature.runtime.provider
        self.output_names = tuple(spec.name for spec in bundle.signature.outputs)
        threads = bundle.signature.runtime.threads if threads is None else threads
        self._session, self.fallback = _open(bundle, requested, threads)
        if self.fallback:
            where = log_fields(provider=self.provider, requested=requested)
            log.info("the model runs on the CPU: %s", self.fallback, extra=where)
        self._device = "cuda" if self.provider in (CUDA, TENSORRT) and can_bind(self._session) else ""
        self._bfloat16 = bfloat16.uses_bfloat16(self._session)
        # On a GPU, ONNX Runtime has streams, handles and captured graphs for each thread that runs a session, so that
        # one thread is one stream for each loaded model. Runs that share buffers are one after the other in it.
        self._thread = None if self.provider == CPU else ThreadPoolExecutor(1, thread_name_prefix="gpu")
        self._pinned = PinnedMemory() if self._device else None
        self._graphs: CudaGraphs | None = None
        self._run_options: Any = None
        self._bundle, self._threads = bundle, threads
        _agree(bundle, "input", bundle.signature.inputs, self._session.get_inputs())
        _agree(bundle, "output", bundle.signature.outputs, self._session.get_outputs())
        if self._bfloat16 and any(spec.datatype == "BYTES" for spec in bundle.signature.inputs):
            raise BundleError(
                f"{bundle.model}: ONNX Runtime supports no strings together with BF16; cast one of them in the model"
            )

    @property
    def provider(self) -> str:
        """Return the preferred provider by ONNX Runtime's name."""
        return str(self._session.get_providers()[0])

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str] | None = None) -> dict[str, Array]:
        """Return the named outputs, or all in the signature's order."""
        names = list(outputs or self.output_names)
        try:
            values = self._call(self._compute, names, inputs)
        except InvalidArgument as error:  # names, types and shapes were validated, so the client's values are the cause
            _, _, reason = str(error).partition("Status Message: ")
            text = f"inputs: the model cannot compute with these values: {reason or 'rejected'}"
            raise InvalidPayload(text) from error
        return dict(zip(names, values, strict=True))

    def _call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call it in the session's thread, where it has one."""
        return function(*arguments) if self._thread is None else self._thread.submit(function, *arguments).result()

    def _compute(self, names: list[str], inputs: Mapping[str, Array]) -> list[Array]:
        if self._bfloat16:
            return bfloat16.run(self._session, names, inputs)
        if not self._device:
            return list(self._session.run(names, dict(inputs)))
        if self._graphs and (values := self._graphs.run(names, inputs, self._pinned)) is not None:
            return values
        return run_bound(self._session, names, inputs, self._device, self._pinned, self._run_options)

    @property
    def can_capture(self) -> bool:
        """Return whether the whole model runs on CUDA, with tensors that stay at one address."""
        return self.provider == CUDA and bool(self._device) and not self.fallback and not self._bfloat16

    def with_graphs(self, batches: Sequence[Mapping[str, Array]]) -> Session:
        """Return a session that runs batches of these shapes as CUDA graphs; raise what prevents it."""
        session = copy.copy(self)
        providers = [(CUDA, {"enable_cuda_graph": "1"}), CPU]
        session._session = _load(self._bundle, _options(self._threads, spinning=False), providers, fallback=False)
        places = {info.name for info in session._session.get_input_memory_infos()}
        if places != {"Cuda"}:  # a graph would keep the values of the run that it was captured from
            raise ResourceError(f"inputs are read in {', '.join(sorted(places))}, and not on the GPU alone")
        session._run_options, session._graphs = graph_options(-1), CudaGraphs(session._session, self._device)
        names = [node.name for node in session._session.get_outputs()]
        for batch in batches:
            arguments = (session._session, names, batch, self._device, self._pinned, session._run_options)
            outputs = session._call(run_bound, *arguments)
            session._call(session._graphs.capture, batch, outputs)
        return session

    @property
    def device(self) -> str:
        """Return the device of tensors that are kept between two runs."""
        return self._device or "cpu"

    def keep(
        self, inputs: Mapping[str, Any], read: Sequence[str], kept: Sequence[str]
    ) -> tuple[list[Array], list[Any]]:
        """Run once; return outputs to `read` as arrays, and those to be `kept` as inputs of the next run."""
        return self._call(run_with_cache, self._session, inputs, read, kept, self.device, self._pinned)


def choose_providers(requested: Provider, problem: str) -> tuple[list[str], str]:
    """Return the providers for ONNX Runtime and the reason of a fallback; `problem`: why GPUs cannot work, or empty."""
    if requested == "cpu":
        return [CPU], ""
    gpu = [TENSORRT, CUDA] if requested == "tensorrt" else [CUDA]
    return ([CPU] if problem else [*gpu, CPU]), accept_fallback(requested, problem)


def accept_fallback(requested: Provider, reason: str) -> str:
    """Return the reason for `auto`; raise it for `cuda` and `tensorrt`, which must not fall back."""
    if requested != "auto" and reason:
        others = "cpu, cuda or auto" if requested == "tensorrt" else "cpu or auto"
        raise ResourceError(
            f"provider {requested}: {reason}; to fix it: install what is missing, or start with --provider {others}"
        )
    return reason


def disagreements(kind: str, specs: Sequence[TensorSpec], nodes: Sequence[Any]) -> list[str]:
    """Return the differences between the model's inputs or outputs and the signature's."""
    by_name = {node.name: node for node in nodes}
    expected = {spec.name: spec for spec in specs}
    if by_name.keys() != expected.keys():
        return [f"{kind}s are {', '.join(sorted(by_name))}; the signature has {', '.join(sorted(expected))}"]
    return [text for name, spec in expected.items() if (text := _difference(f"{kind} {name}", spec, by_name[name]))]


def _open(bundle: Bundle, requested: Provider, threads: int) -> tuple[Any, str]:
    """Return the session, and why it runs on the CPU although another provider was requested."""
    providers, fallback = choose_providers(requested, _gpu_problem(bundle, requested))
    options = _options(threads, spinning=bundle.signature.generation is not None)
    if CUDA not in providers:
        return _load(bundle, options, providers), fallback
    with profile_folder() as folder:
        enable_profiling(options, folder)
        if TENSORRT in providers:
            session = _load_tensorrt(bundle, options)
        else:
            session = _load(bundle, options, [(CUDA, {"use_ep_level_unified_stream": "1"}), CPU])
        return session, accept_fallback(requested, _gpu_fallback_reason(bundle, session, providers[:-1]))


def _gpu_problem(bundle: Bundle, requested: Provider) -> str:
    """Return why the requested provider cannot work here; empty if it should."""
    if requested == "cpu":
        return ""
    available = onnxruntime.get_available_providers()
    if (problem := cuda_problem(available)) or requested != "tensorrt":
        return problem
    if bundle.signature.generation is not None:
        return "an engine has a maximum size, and the cache of a language model grows with each token"
    return tensorrt.tensorrt_problem(available)


def _load_tensorrt(bundle: Bundle, options: Any) -> Any:
    """Load the model with one engine for all shapes; where that fails, with engines that grow with the shapes."""
    try:
        return _load(bundle, options, [(TENSORRT, tensorrt.provider_options(bundle)), CUDA, CPU], fallback=False)
    except BundleError as error:  # as where CUDA computes some nodes, and shapes between them vary
        log.warning("model=%s engines=built-for-new-shapes reason=%r", bundle.name, str(error))
    settings = tensorrt.provider_options(bundle, profiles=False)
    return _load(bundle, options, [(TENSORRT, settings), CUDA, CPU], fallback=False)


def _gpu_fallback_reason(bundle: Bundle, session: Any, providers: Sequence[str]) -> str:
    """Return why the model does not run on these providers completely; empty where it does."""
    if missing := [provider for provider in providers if provider not in session.get_providers()]:
        session.end_profiling()
        return f"there is a device, but ONNX Runtime could not load {missing[0]} (CUDA or cuDNN libraries)"
    try:
        nodes = misplaced_nodes(*profile_run(session, bundle.golden().inputs), *providers)
    except Exception as error:  # from ONNX Runtime or a damaged golden file
        raise BundleError(f"{bundle.path}: golden requests failed: {type(error).__name__}: {error}") from error
    return describe_nodes(nodes)


def _options(threads: int, *, spinning: bool) -> Any:
    """Return the session options. `spinning` threads wait busily for work within a run, never between runs.

    They take cores from other requests, which pays only for the hundreds of short nodes of a decoding step.
    """
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.add_session_config_entry("session.intra_op.allow_spinning", "1" if spinning else "0")
    options.add_session_config_entry("session.force_spinning_stop", "1")
    options.add_session_config_entry("session.inter_op.allow_spinning", "0")
    options.log_severity_level = 4  # silent: errors are raised, and a client's values must not appear in the log
    return options


def _load(bundle: Bundle, options: Any, providers: Sequence[Any], *, fallback: bool = True) -> Any:
    """Load the model; `fallback`: on the next provider where one fails, which ONNX Runtime prints."""
    try:
        return onnxruntime.InferenceSession(
            str(bundle.model), options, providers=list(providers), enable_fallback=int(fallback)
        )
    except Exception as error:  # ONNX Runtime raises a dozen types without a common base
        raise BundleError(f"{bundle.model}: ONNX Runtime cannot load it: {' '.join(str(error).split())}") from error


def _agree(bundle: Bundle, kind: str, specs: Sequence[TensorSpec], nodes: Sequence[Any]) -> None:
    if wrong := disagreements(kind, specs, nodes):
        raise BundleError(f"{bundle.model}: does not match signature.json: {'; '.join(wrong)}; export again")


def _difference(tensor: str, spec: TensorSpec, node: Any) -> str:
    datatype: str = _DATATYPES.get(node.type, node.type)
    if datatype != spec.datatype:
        return f"{tensor} is {datatype}, the signature has {spec.datatype}"
    if len(node.shape) != len(spec.shape):
        return f"{tensor} has {len(node.shape)} axes, the signature has {len(spec.shape)}"
    for axis, (size, expected) in enumerate(zip(node.shape, spec.shape, strict=True)):
        if isinstance(size, int) and size != expected:  # the model may accept more than the signature, not less
            return f"{tensor}, axis {axis} is {size}, the signature has {expected}"
    return ""


def can_bind(session: Any) -> bool:
    """Return whether all tensors can be bound to memory; ONNX Runtime cannot bind strings."""
    return all(node.type != "tensor(string)" for node in (*session.get_inputs(), *session.get_outputs()))


def run_bound(
    session: Any,
    outputs: Sequence[str],
    inputs: Mapping[str, Array],
    device: str,
    pinned: PinnedMemory | None = None,
    options: Any = None,
) -> list[Array]:
    """Run with tensors bound to the device. Each run has its own binding, so that threads can run at the same time."""
    bound = session.io_binding()
    for name, array in inputs.items():
        bound.bind_ortvalue_input(name, _copy_to_device(name, array, device, pinned))
    for name in outputs:  # without a shape: ONNX Runtime allocates it
        bound.bind_output(name, device, 0)
    try:
        session.run_with_iobinding(bound, options)
    except RuntimeError:  # a plain run raises the specific error
        return list(session.run(list(outputs), dict(inputs), options))
    return list(bound.copy_outputs_to_cpu())


def _copy_to_device(name: str, array: Array, device: str, pinned: PinnedMemory | None) -> Any:
    return onnxruntime.OrtValue.ortvalue_from_numpy(pinned.copy(name, array) if pinned else array, device, 0)


def run_with_cache(
    session: Any,
    inputs: Mapping[str, Any],
    read: Sequence[str],
    kept: Sequence[str],
    device: str,
    pinned: PinnedMemory | None,
) -> tuple[list[Array], list[Any]]:
    """Run with tensors of an earlier run: outputs to `read` are copied to arrays, those `kept` stay on the device."""
    bound = session.io_binding()
    for name, value in inputs.items():
        if isinstance(value, np.ndarray):
            value = _copy_to_device(name, value, device, pinned)
        bound.bind_ortvalue_input(name, value)
    for name in read:
        bound.bind_output(name, "cpu", 0)
    for name in kept:
        bound.bind_output(name, device, 0)
    session.run_with_iobinding(bound)
    values = list(bound.get_outputs())
    return [value.numpy() for value in values[: len(read)]], values[len(read) :]


_METADATA_ONLY = ("Shape", "Size")  # they read the size of a tensor, not its values
_INTEGERS = ("int64", "int32", "bool")
_MAX_SHAPE_ELEMENTS = 64  # a larger tensor is not taken for the axes of a shape
# Operators with which exporters compute shapes; accepted of nodes that did not run.
_OF_SHAPES = (*_METADATA_ONLY, "Constant", "Identity", "Gather", "Slice", "Concat", "Squeeze", "Unsqueeze", "Cast")
_MAX_LISTED = 5  # nodes in a message


@dataclass(frozen=True)
class Node:
    """A node of the graph and its provider."""

    name: str
    op: str
    provider: str


@dataclass(frozen=True)
class Kernel:
    """A node that ran, with type and shape of its inputs and outputs."""

    node: Node
    tensors: tuple[tuple[str, tuple[int, ...]], ...]


@contextlib.contextmanager
def profile_folder() -> Iterator[Path]:
    """Create a temporary folder for the profile."""
    try:
        folder = tempfile.TemporaryDirectory(prefix="pipe-serve-")
    except OSError as error:
        raise ResourceError(
            f"providers of GPUs: a profile shows where nodes run, and needs a writable folder: {error}; "
            "to fix it: mount one at /tmp, or set TMPDIR"
        ) from error
    with folder as name:
        yield Path(name)


def enable_profiling(options: Any, folder: Path) -> None:
    """Set the session options that `profile_run` needs."""
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    options.enable_profiling = True
    options.profile_file_prefix = str(folder / "placement")


def profile_run(session: Any, inputs: Mapping[str, Any]) -> tuple[list[Node], list[Kernel]]:
    """Run once and return all nodes of the graph and those that ran. Ends profiling."""
    try:
        if bfloat16.uses_bfloat16(session):
            bfloat16.run(session, [node.name for node in session.get_outputs()], inputs)
        else:
            session.run(None, dict(inputs))
    finally:
        profile = Path(session.end_profiling())
    return assigned_nodes(session), read_profile(profile)


def assigned_nodes(session: Any) -> list[Node]:
    return [
        Node(node.name, node.op_type, part.ep_name)
        for part in session.get_provider_graph_assignment_info()
        for node in part.get_nodes()
    ]


def read_profile(path: Path) -> list[Kernel]:
    """Read the kernels from a profile of ONNX Runtime."""
    events = json.loads(path.read_text())
    return [_kernel(event) for event in events if "provider" in event.get("args", {})]


def misplaced_nodes(nodes: Iterable[Node], ran: Sequence[Kernel], *providers: str) -> list[Node]:
    """Return the nodes that none of these providers computes.

    Only the arithmetic of shapes may stay on the CPU, where ONNX Runtime needs its results to allocate memory, and only
    if the profile shows that no data went through it.
    """
    foreign = [kernel for kernel in ran if kernel.node.provider not in providers]
    wrong = {kernel.node: None for kernel in foreign if not _is_shape_arithmetic(kernel)}
    seen = {kernel.node.name for kernel in foreign} | {kernel.node.op for kernel in foreign}
    for node in nodes:  # in a branch that did not run, or removed by an optimization
        accepted = (node.name or node.op) in seen or node.op in _OF_SHAPES
        if node.provider not in providers and not accepted:
            wrong[node] = None
    return list(wrong)


def describe_nodes(nodes: Sequence[Node]) -> str:
    """Return a clause for messages; empty without nodes."""
    if not nodes:
        return ""
    listed = ", ".join(f"{node.name or 'unnamed'} ({node.op}, {node.provider})" for node in nodes[:_MAX_LISTED])
    more = f" and {len(nodes) - _MAX_LISTED} more" if len(nodes) > _MAX_LISTED else ""
    verb = "run" if len(nodes) > 1 else "runs"
    return f"{len(nodes)} of the model's nodes {verb} on another provider: {listed}{more}"


def _is_shape_arithmetic(kernel: Kernel) -> bool:
    if kernel.node.op in _METADATA_ONLY:
        return True
    return all(
        kind in _INTEGERS and len(shape) <= 1 and sum(shape) <= _MAX_SHAPE_ELEMENTS for kind, shape in kernel.tensors
    )


def _kernel(event: Mapping[str, Any]) -> Kernel:
    args = event["args"]
    sides = ("input_type_shape", "output_type_shape")
    tensors = [item for side in sides for tensor in args[side] for item in tensor.items()]
    node = Node(event["name"].removesuffix("_kernel_time"), args["op_name"], args["provider"])
    return Kernel(node, tuple((kind, tuple(shape)) for kind, shape in tensors))
