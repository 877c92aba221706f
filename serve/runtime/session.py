"""One ONNX Runtime session over a verified bundle: where it runs, and that it is the model the signature describes.

One run with its tensors bound to a device's memory: each input goes there once, the outputs come back once.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import onnxruntime
from onnxruntime.capi.onnxruntime_pybind11_state import InvalidArgument

from pipeline.contract.bundle import Bundle
from pipeline.contract.errors import BundleError, InvalidPayload, ResourceError
from pipeline.contract.processes import why_no_cuda
from pipeline.contract.signature import TensorSpec
from serve.logs import told
from serve.runtime import bfloat16, placement

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
Array = np.ndarray[Any, Any]
Provider = Literal["auto", "cpu", "cuda"]

DATATYPES = {
    "tensor(bool)": "BOOL",
    "tensor(uint8)": "UINT8",
    "tensor(uint16)": "UINT16",
    "tensor(uint32)": "UINT32",
    "tensor(uint64)": "UINT64",
    "tensor(int8)": "INT8",
    "tensor(int16)": "INT16",
    "tensor(int32)": "INT32",
    "tensor(int64)": "INT64",
    "tensor(float16)": "FP16",
    "tensor(float)": "FP32",
    "tensor(double)": "FP64",
    "tensor(bfloat16)": "BF16",
    "tensor(string)": "BYTES",
}

log = logging.getLogger(__name__)


class Session:
    """The bundle's model, loaded; `run` is safe to call from several threads at once."""

    def __init__(self, bundle: Bundle, provider: Provider | None = None, threads: int | None = None) -> None:
        wanted = provider or bundle.signature.runtime.provider
        self.outputs = tuple(spec.name for spec in bundle.signature.outputs)
        threads = bundle.signature.runtime.threads if threads is None else threads
        self._session, self.fallback = _open(bundle, wanted, threads)
        if self.fallback:
            where = told(provider=self.provider, wanted=wanted)
            log.warning("the provider that was wished for is not used: %s", self.fallback, extra=where)
        self._device = "cuda" if self.provider == CUDA and suits(self._session) else ""
        self._bfloat16 = bfloat16.concerns(self._session)
        _agree(bundle, "input", bundle.signature.inputs, self._session.get_inputs())
        _agree(bundle, "output", bundle.signature.outputs, self._session.get_outputs())
        if self._bfloat16 and any(spec.datatype == "BYTES" for spec in bundle.signature.inputs):
            raise BundleError(
                f"{bundle.model}: ONNX Runtime takes no strings beside BF16; cast one of them in the model"
            )

    @property
    def provider(self) -> str:
        """The provider that has the first say, in ONNX Runtime's words."""
        return str(self._session.get_providers()[0])

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str] | None = None) -> dict[str, Array]:
        """The named outputs; all of them, in the signature's order, when none is named."""
        names = list(outputs or self.outputs)
        try:
            if self._bfloat16:
                values = bfloat16.run(self._session, names, inputs)
            elif self._device:
                values = run(self._session, names, inputs, self._device)
            else:
                values = self._session.run(names, dict(inputs))
        except InvalidArgument as error:  # names, types and shapes were checked, so it is the values: the client's
            _, _, told = str(error).partition("Status Message: ")
            raise InvalidPayload(f"inputs: the model cannot compute with these values: {told or 'refused'}") from error
        return dict(zip(names, values, strict=True))

    @property
    def device(self) -> str:
        """Where tensors lie that stay between two runs."""
        return self._device or "cpu"

    def keep(
        self, inputs: Mapping[str, Any], read: Sequence[str], kept: Sequence[str]
    ) -> tuple[list[Array], list[Any]]:
        """Arrays of the outputs that are `read`; those `kept` are what the next run may take as inputs."""
        return keep(self._session, inputs, read, kept, self.device)


def choose_providers(wanted: Provider, no_cuda: str) -> tuple[list[str], str]:
    """What to ask ONNX Runtime for and, where a wish gave way, why; `no_cuda` says why CUDA cannot work, if so."""
    if wanted == "cpu":
        return [CPU], ""
    return ([CPU] if no_cuda else [CUDA, CPU]), give_way(wanted, no_cuda)


def give_way(wanted: Provider, reason: str) -> str:
    """`auto` takes what there is and says why; `cuda` takes nothing else."""
    if wanted == "cuda" and reason:
        raise ResourceError(f"provider cuda: {reason}; mend that, or start with --provider cpu or auto")
    return reason


def disagreements(kind: str, specs: Sequence[TensorSpec], nodes: Sequence[Any]) -> list[str]:
    """Each way the model's own inputs or outputs differ from the signature's."""
    found = {node.name: node for node in nodes}
    wanted = {spec.name: spec for spec in specs}
    if found.keys() != wanted.keys():
        return [f"{kind}s are {', '.join(sorted(found))}; the signature has {', '.join(sorted(wanted))}"]
    return [text for name, spec in wanted.items() if (text := _difference(f"{kind} {name}", spec, found[name]))]


def _open(bundle: Bundle, wanted: Provider, threads: int) -> tuple[Any, str]:
    """The session, and why it runs on the CPU though another provider was wished for."""
    no_cuda = "" if wanted == "cpu" else why_no_cuda(onnxruntime.get_available_providers())
    providers, fallback = choose_providers(wanted, no_cuda)
    options = _options(threads, spinning=bundle.signature.generation is not None)
    if CUDA not in providers:
        return _load(bundle, options, providers), fallback
    with placement.scratch() as folder:
        placement.watch(options, folder)
        session = _load(bundle, options, providers)
        return session, give_way(wanted, _why_not_all_on_cuda(bundle, session))


def _why_not_all_on_cuda(bundle: Bundle, session: Any) -> str:
    """One clause, or nothing when every node that computes runs there."""
    if CUDA not in session.get_providers():
        session.end_profiling()
        return "a device is there, but ONNX Runtime could not load its CUDA provider (CUDA or cuDNN libraries)"
    try:
        nodes = placement.elsewhere(*placement.observe(session, bundle.golden().inputs), CUDA)
    except Exception as error:  # of ONNX Runtime and of a damaged golden file alike; the cause is kept
        raise BundleError(f"{bundle.path}: golden requests failed: {type(error).__name__}: {error}") from error
    return placement.told(nodes)


def _options(threads: int, *, spinning: bool) -> Any:
    """A thread that spins while it waits for work takes the core from whoever reads the next requests.

    For the hundreds of short nodes of a step that writes one token it is worth that, and never between two runs.
    """
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.add_session_config_entry("session.intra_op.allow_spinning", "1" if spinning else "0")
    options.add_session_config_entry("session.force_spinning_stop", "1")
    options.add_session_config_entry("session.inter_op.allow_spinning", "0")
    options.log_severity_level = 4  # silent: errors are raised, and a client's values must not write to our log
    return options


def _load(bundle: Bundle, options: Any, providers: Sequence[str]) -> Any:
    try:
        return onnxruntime.InferenceSession(str(bundle.model), options, providers=list(providers))
    except Exception as error:  # ONNX Runtime raises a dozen types without a common base
        raise BundleError(f"{bundle.model}: ONNX Runtime cannot load it: {' '.join(str(error).split())}") from error


def _agree(bundle: Bundle, kind: str, specs: Sequence[TensorSpec], nodes: Sequence[Any]) -> None:
    if wrong := disagreements(kind, specs, nodes):
        raise BundleError(f"{bundle.model}: does not fit signature.json: {'; '.join(wrong)}; export again")


def _difference(place: str, spec: TensorSpec, node: Any) -> str:
    datatype = DATATYPES.get(node.type, node.type)
    if datatype != spec.datatype:
        return f"{place} is {datatype}, the signature says {spec.datatype}"
    if len(node.shape) != len(spec.shape):
        return f"{place} has {len(node.shape)} axes, the signature says {len(spec.shape)}"
    for axis, (found, said) in enumerate(zip(node.shape, spec.shape, strict=True)):
        if isinstance(found, int) and found != said:  # the model may be freer than the signature, never stricter
            return f"{place}, axis {axis} is {found}, the signature says {said}"
    return ""


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
