"""One ONNX Runtime session over a verified bundle: where it runs, and that it is the model the signature describes."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import onnxruntime
from onnxruntime.capi.onnxruntime_pybind11_state import InvalidArgument

from pipeline.spec.bundle import Bundle
from pipeline.spec.errors import BundleError, InvalidPayload, ResourceError
from pipeline.spec.signature import TensorSpec
from serve.cuda import why_no_cuda

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
            log.warning("provider=cpu wanted=%s reason=%r", wanted, self.fallback)
        _agree(bundle, "input", bundle.signature.inputs, self._session.get_inputs())
        _agree(bundle, "output", bundle.signature.outputs, self._session.get_outputs())

    @property
    def provider(self) -> str:
        """The provider that has the first say, in ONNX Runtime's words."""
        return str(self._session.get_providers()[0])

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str] | None = None) -> dict[str, Array]:
        """The named outputs; all of them, in the signature's order, when none is named."""
        names = list(outputs or self.outputs)
        try:
            values = self._session.run(names, dict(inputs))
        except InvalidArgument as error:  # names, types and shapes were checked, so it is the values: the client's
            _, _, told = str(error).partition("Status Message: ")
            raise InvalidPayload(f"inputs: the model cannot compute with these values: {told or 'refused'}") from error
        return dict(zip(names, values, strict=True))


def choose_providers(wanted: Provider, no_cuda: str) -> tuple[list[str], str]:
    """What to ask ONNX Runtime for and, where a wish gave way, why; `no_cuda` says why CUDA cannot work, if so."""
    if wanted == "cpu":
        return [CPU], ""
    if not no_cuda:
        return [CUDA, CPU], ""
    if wanted == "cuda":
        raise ResourceError(f"provider cuda: {no_cuda}; mend that, or start with --provider cpu")
    return [CPU], no_cuda


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
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3  # errors only: what is left to warn of is ours to say
    try:
        session = onnxruntime.InferenceSession(str(bundle.model), options, providers=providers)
    except Exception as error:  # ONNX Runtime raises a dozen types without a common base
        raise BundleError(f"{bundle.model}: ONNX Runtime cannot load it: {' '.join(str(error).split())}") from error
    if CUDA in providers and CUDA not in session.get_providers():
        reason = "a device is there, but ONNX Runtime could not load its CUDA provider (CUDA or cuDNN libraries)"
        _, fallback = choose_providers(wanted, reason)
    return session, fallback


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
