"""The Open Inference Protocol over gRPC, answered by the same predictor as REST."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn

import numpy as np
from grpc import StatusCode, aio
from grpc_interceptor.exception_to_status import AsyncExceptionToStatusInterceptor
from kserve.protocol.grpc import grpc_predict_v2_pb2 as pb
from kserve.protocol.grpc.grpc_predict_v2_pb2_grpc import add_GRPCInferenceServiceServicer_to_server
from kserve.protocol.grpc.servicer import InferenceServicer
from kserve.protocol.model_repository_extension import ModelRepositoryExtension

from pipeline.spec.errors import InvalidPayload
from pipeline.spec.signature import NUMPY_TYPES
from serve.app import INTERNAL
from serve.deadline import of_call, of_parameter
from serve.logs import told
from serve.model import OnnxPlane
from serve.observer import Observer
from serve.predictor import Predictor
from serve.refusal import Headers, refusal_of
from serve.tensors import Request, Tensor, Wish, to_raw
from serve.watch import Watch

_CONTENTS = {
    "BOOL": "bool_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}
_READ = ("x-request-id", "traceparent")  # of what a call carries beside its message
_QUICK_BYTES = 256 << 10  # of a message are read in well under a millisecond
_OVERHEAD_BYTES = 1 << 16  # names and shapes around the tensors' own bytes

log = logging.getLogger(__name__)


class Call:
    """One inference."""

    def __init__(self, message: Any, version: str) -> None:
        self._message, self._version = message, version  # pb.ModelInferRequest
        self._request = Request("", (), ())
        self.quick = message.ByteSize() < _QUICK_BYTES

    @property
    def timeout_seconds(self) -> float:
        if "timeout" not in self._message.parameters:
            return math.inf
        told = self._message.parameters["timeout"]
        return of_parameter(getattr(told, told.WhichOneof("parameter_choice") or "", None))

    def read(self, predictor: Predictor) -> tuple[Mapping[str, np.ndarray[Any, Any]], Sequence[str]]:
        self._request = parse(self._message)
        arrays = self._request.arrays(predictor.signature)
        return arrays, [wish.name for wish in self._request.wishes(predictor.signature)]

    def write(self, predictor: Predictor, outputs: Mapping[str, np.ndarray[Any, Any]]) -> Any:
        wishes = self._request.wishes(predictor.signature)
        return render(self._message, self._version, wishes, outputs, predictor.datatypes)


def parse(message: Any) -> Request:
    """Raw contents, when used, are used for every input; answers then are raw as well."""
    raws = message.raw_input_contents
    if raws and len(raws) != len(message.inputs):
        raise InvalidPayload(f"raw_input_contents: {len(raws)} given for {len(message.inputs)} inputs")
    tensors = []
    for index, one in enumerate(message.inputs):
        if raws and one.HasField("contents"):
            raise InvalidPayload(f"inputs: {one.name}: has contents beside raw_input_contents")
        if any(axis < 0 for axis in one.shape):
            raise InvalidPayload(f"inputs: {one.name}: shape {list(one.shape)} has a negative axis")
        data = raws[index] if raws else _contents(one)
        tensors.append(Tensor(one.name, one.datatype, list(one.shape), data))
    outputs = [Wish(wish.name, bool(raws)) for wish in message.outputs]
    return Request(message.id, tensors, outputs, binary=bool(raws))


def render(
    message: Any,
    version: str,
    wishes: Sequence[Wish],
    outputs: Mapping[str, np.ndarray[Any, Any]],
    datatypes: Mapping[str, str],
) -> Any:
    answer = pb.ModelInferResponse(model_name=message.model_name, model_version=version, id=message.id)
    # FP16 has no typed contents, and raw and typed outputs cannot be mixed in one answer.
    raw = any(wish.binary or datatypes[wish.name] == "FP16" for wish in wishes)
    for wish in wishes:
        array, datatype = outputs[wish.name], datatypes[wish.name]
        tensor = answer.outputs.add(name=wish.name, datatype=datatype, shape=array.shape)
        if raw:
            answer.raw_output_contents.append(to_raw(array))
        else:
            values = array.ravel().tolist()
            values = [str(value).encode() for value in values] if datatype == "BYTES" else values
            getattr(tensor.contents, _CONTENTS[datatype]).extend(values)
    return answer


class Servicer(InferenceServicer):  # type: ignore[misc]  # kserve ships no types
    """kserve's servicer for health and metadata; inference by our rules, and no loading or unloading by clients."""

    def __init__(self, plane: OnnxPlane, observer: Observer, headers: Sequence[tuple[str, str]]) -> None:
        super().__init__(plane, ModelRepositoryExtension(plane.model_registry))
        self._plane = plane
        self._observer = observer
        self._headers = headers

    async def ModelInfer(self, request: Any, context: Any) -> Any:  # noqa: N802  # the protocol's name
        given = {key: value for key, value in context.invocation_metadata() if key in _READ}
        watch = self._observer.begin(_bytes(given.get("x-request-id")), "ModelInfer", _bytes(given.get("traceparent")))
        self._observer.asked(watch, "grpc")
        try:
            watch.served = served = self._plane.served(request.model_name, request.model_version)
            await context.send_initial_metadata([*self._headers, *_identity(watch, served.headers)])
            timeout_seconds = of_call(context.time_remaining())
            served.admit(timeout_seconds)
            answer = await served.answer(Call(request, served.version), timeout_seconds, watch=watch)
            watch.code = StatusCode.OK.name
            return answer
        except Exception as error:
            if watch.served is None:
                await context.send_initial_metadata([*self._headers, *_identity(watch, ())])
            self._failed(watch, error)
            raise
        finally:
            self._observer.ended(watch)

    def _failed(self, watch: Watch, error: Exception) -> None:
        watch.code = status_of(error).name
        if (refusal := refusal_of(error)) is not None:
            self._observer.refused(watch, refusal.reason)
        else:
            log.error("request failed", exc_info=error, extra=told(request_id=watch.id.decode(), path=watch.path))

    async def RepositoryModelLoad(self, request: Any, context: Any) -> None:  # noqa: N802, ARG002
        await context.abort(StatusCode.UNIMPLEMENTED, "this server serves one bundle from its start to its end")

    RepositoryModelUnload = RepositoryModelLoad


class Refusals(AsyncExceptionToStatusInterceptor):
    """The client's mistakes with their sentence; ours opaque, with the traceback in the log."""

    async def handle_exception(
        self,
        ex: Exception,
        request_or_iterator: Any,  # noqa: ARG002  # the signature is grpc_interceptor's
        context: Any,
        method_name: str,
    ) -> NoReturn:
        if isinstance(ex, aio.AbortError):
            raise ex
        status = status_of(ex)
        if status is StatusCode.INTERNAL and not method_name.endswith("/ModelInfer"):  # which has told of it
            log.error("%s failed", method_name, exc_info=ex)
        await context.abort(status, INTERNAL if status is StatusCode.INTERNAL else str(ex))
        raise ex  # never reached: abort raises


def status_of(error: Exception) -> StatusCode:
    refusal = refusal_of(error)
    return StatusCode.INTERNAL if refusal is None else StatusCode[refusal.code]


def _identity(watch: Watch, headers: Headers) -> list[tuple[str, str]]:
    return [(key.decode(), value.decode()) for key, value in ((b"x-request-id", watch.id), *headers)]


def _bytes(value: str | bytes | None) -> bytes:
    return value.encode() if isinstance(value, str) else value or b""


def build(servicer: Servicer, max_body_bytes: int, before: Sequence[Any] = ()) -> Any:
    """A gRPC server without a port; `before` are interceptors that every call passes first."""
    server = aio.server(
        ThreadPoolExecutor(1),  # grpc wants one for handlers that are not coroutines; we have none
        interceptors=(*before, Refusals()),
        options=[
            ("grpc.max_receive_message_length", max_body_bytes + _OVERHEAD_BYTES),
            ("grpc.max_send_message_length", -1),
        ],
    )
    add_GRPCInferenceServiceServicer_to_server(servicer, server)
    return server


def _contents(one: Any) -> list[Any]:
    if one.datatype not in NUMPY_TYPES:
        raise InvalidPayload(f"inputs: {one.name}: unknown datatype {one.datatype!r}")
    if one.datatype == "FP16":
        raise InvalidPayload(f"inputs: {one.name}: FP16 travels in raw_input_contents only")
    values = list(getattr(one.contents, _CONTENTS[one.datatype]))
    if one.datatype != "BYTES":
        return values
    try:
        return [value.decode() for value in values]
    except UnicodeDecodeError:
        raise InvalidPayload(f"inputs: {one.name}: bytes_contents holds an element that is not UTF-8") from None
