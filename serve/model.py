"""The bundle as kserve knows it: one model in its registry, whose predictions run off the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from kserve import Model
from kserve.model import InferenceVerb
from kserve.protocol.dataplane import DataPlane

from pipeline.spec.bundle import Bundle
from pipeline.spec.errors import InvalidPayload
from pipeline.spec.signature import TensorSpec
from serve.predictor import Predictor

PLATFORM = "onnx_onnxv1"  # the protocol's name for an ONNX model run by ONNX Runtime


class Call(Protocol):
    """One request in its wire format: bytes in, answer out, all of it in a worker thread."""

    def answer(self, predictor: Predictor) -> Any: ...


class OnnxModel(Model):  # type: ignore[misc]  # kserve ships no types
    """Overrides kserve's preprocess → predict → postprocess: one hop to a thread instead of work on the loop."""

    def __init__(self, name: str, bundle: Bundle, predictor: Predictor, workers: int) -> None:
        super().__init__(name)
        self.bundle = bundle
        self.predictor = predictor
        self._workers = ThreadPoolExecutor(workers, thread_name_prefix="predict")
        self.ready = True

    async def __call__(
        self,
        body: Call,
        headers: Mapping[str, str] | None = None,  # noqa: ARG002  # the data plane passes them
        verb: InferenceVerb = InferenceVerb.PREDICT,
    ) -> tuple[Any, dict[str, str]]:
        if verb is not InferenceVerb.PREDICT:
            raise InvalidPayload("explain: this model predicts and does not explain")
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._workers, body.answer, self.predictor), {}

    def get_input_types(self) -> list[dict[str, Any]]:
        return [_metadata(spec) for spec in self.bundle.signature.inputs]

    def get_output_types(self) -> list[dict[str, Any]]:
        return [_metadata(spec) for spec in self.bundle.signature.outputs]

    def stop(self) -> None:
        super().stop()
        self._workers.shutdown(wait=False, cancel_futures=True)


class OnnxPlane(DataPlane):  # type: ignore[misc]  # kserve ships no types
    """kserve's data plane, honest about readiness: not ready while draining, nor without a ready model."""

    draining = False

    async def ready(self) -> bool:
        models = self.model_registry.get_models().values()
        return not self.draining and bool(models) and all(model.ready for model in models)

    async def model_ready(self, model_name: str, disable_predictor_health_check: bool = False) -> bool:
        ready: bool = await super().model_ready(model_name, disable_predictor_health_check)
        return ready and not self.draining

    def metadata(self) -> dict[str, Any]:
        return {"name": "pipe", "version": self._server_version, "extensions": ["binary_tensor_data"]}

    async def model_metadata(self, model_name: str) -> dict[str, Any]:
        model = self.get_model_from_registry(model_name)
        session = model.predictor.session
        return {
            "name": model_name,
            "platform": PLATFORM,
            "inputs": model.get_input_types(),
            "outputs": model.get_output_types(),
            "properties": {
                "bundle": model.bundle.digest,
                "verdict": model.bundle.manifest.verdict,
                "provider": session.provider,
                "provider_fallback": session.fallback,
            },
        }

    async def predict(self, model_name: str, call: Call) -> Any:
        answer, _ = await self.infer(model_name, call)
        return answer


def _metadata(spec: TensorSpec) -> dict[str, Any]:
    return {"name": spec.name, "datatype": spec.datatype, "shape": spec.protocol_shape}
