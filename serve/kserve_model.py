"""A bundle as a `kserve.Model`, for those who run kserve's own ModelServer: `python -m serve.kserve_model BUNDLE`.

It verifies the bundle, its golden requests and every request as the service does. Batching, deadlines, canaries and
signature checks of `python -m serve` are not in it. Options after the bundle are kserve's, such as --http_port.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path
from typing import Any

from kserve import InferInput, InferOutput, InferRequest, InferResponse, Model, ModelServer, model_server
from kserve.errors import InvalidInput

from pipeline.contract.bundle import Bundle, open_bundle
from pipeline.system.errors import BundleError, InvalidPayload, PipelineError
from serve.model_version import tensor_metadata
from serve.protocol import tensors, v2
from serve.runtime.loading import load_predictor


class BundleModel(Model):  # type: ignore[misc]  # kserve ships no types
    """Answers V1, V2 and gRPC requests of kserve's server from a bundle."""

    def __init__(self, name: str, bundle: Bundle) -> None:
        super().__init__(name)
        self.bundle = bundle

    def load(self) -> bool:
        """Load and verify the bundle; kserve's server accepts a model only after this."""
        for spec in (*self.bundle.signature.inputs, *self.bundle.signature.outputs):
            if spec.datatype == "BF16":
                raise BundleError(f"{self.bundle.path}: {spec.name} is BF16, which kserve lacks; use `python -m serve`")
        self.predictor = load_predictor(self.bundle)
        self.ready = True
        return True

    def get_input_types(self) -> list[dict[str, Any]]:
        return [tensor_metadata(spec) for spec in self.predictor.signature.inputs]

    def get_output_types(self) -> list[dict[str, Any]]:
        return [tensor_metadata(spec) for spec in self.predictor.signature.outputs]

    async def predict(
        self,
        payload: dict[str, Any] | InferRequest,
        headers: dict[str, str] | None = None,  # noqa: ARG002  # part of kserve's interface
        response_headers: dict[str, str] | None = None,  # noqa: ARG002
    ) -> dict[str, Any] | InferResponse:
        answer = self._infer if isinstance(payload, InferRequest) else self._predict
        try:
            return await asyncio.to_thread(answer, payload)
        except InvalidPayload as error:
            raise InvalidInput(str(error)) from None

    def _predict(self, payload: dict[str, Any]) -> dict[str, Any]:
        """Answer V1."""
        return {"predictions": self.predictor.predict(payload.get("instances"))}

    def _infer(self, payload: InferRequest) -> InferResponse:
        """Answer V2 and gRPC."""
        requested = [tensors.RequestedOutput(output.name, binary=False) for output in payload.request_outputs or ()]
        request = tensors.InferRequest(payload.id or "", [_tensor(item) for item in payload.inputs], requested)
        decoded = v2.decode_request(request, self.predictor)
        computed = [self.predictor.run(part.arrays, decoded.names) for part in decoded.parts]
        arrays, datatypes = v2.encode_outputs(decoded, computed, self.predictor)
        outputs, binary = [], payload.use_binary_outputs
        for name in (output.name for output in decoded.requested_outputs):
            output = InferOutput(name, list(arrays[name].shape), datatypes[name])
            output.set_data_from_numpy(arrays[name], binary_data=binary)
            outputs.append(output)
        return InferResponse(
            request.id, self.name, outputs, use_binary_outputs=binary, requested_outputs=payload.request_outputs
        )


def _tensor(item: InferInput) -> tensors.Tensor:
    """Return an input as the service's own protocols have it."""
    if item._raw_data is not None:
        return tensors.Tensor(item.name, item.datatype, item.shape, memoryview(item._raw_data))
    values = [value.decode() if isinstance(value, bytes) else value for value in item.data or ()]
    return tensors.Tensor(item.name, item.datatype, item.shape, values)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m serve.kserve_model", parents=[model_server.parser])
    parser.set_defaults(model_name="")
    parser.add_argument("bundle", type=Path)
    options = parser.parse_args()
    try:
        bundle = open_bundle(options.bundle)
        model = BundleModel(options.model_name or bundle.name, bundle)
        model.load()
    except PipelineError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    ModelServer().start([model])
    return 0


if __name__ == "__main__":
    sys.exit(main())
