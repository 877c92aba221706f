"""OpenAI's embeddings: texts in, vectors out, through the codec of a bundle that embeds texts."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import orjson

from pipeline.contract.codec import Array, Arrays, Part
from pipeline.system.errors import InvalidPayload
from serve.protocol.openai import Texts, convert_fields, split_texts
from serve.protocol.v1 import CodecPayload
from serve.request_body import parse_object
from serve.runtime.predictor import Predictor

_MASK, _IDS = "attention_mask", "input_ids"  # inputs that show how many tokens a text has
_UNIT_TOLERANCE = 1e-3  # of the length of a vector that the model normalizes


class EmbeddingRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`POST /openai/v1/embeddings`."""

    model: str
    input: Texts
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, msgspec.Meta(ge=1)] | None = None

    @property
    def instances(self) -> list[str | list[int]]:
        return split_texts(self.input, "input")


def parse(body: bytes) -> EmbeddingRequest:
    return convert_fields(parse_object(body), EmbeddingRequest)


@dataclass
class Payload(CodecPayload):
    """A parsed request."""

    request: EmbeddingRequest

    def decode(self, predictor: Predictor) -> tuple[Sequence[Part], Sequence[str]]:
        check_dimensions(self.request.dimensions, predictor.embedding_sizes or ())
        try:
            self._parts = predictor.decode(self.request.instances)
        except InvalidPayload as error:
            raise type(error)(f"input: {str(error).removeprefix('instances: ')}") from error
        return self._parts, predictor.session.output_names

    def encode(self, predictor: Predictor, outputs: Sequence[Arrays], version: str) -> bytes:  # noqa: ARG002
        vectors = [self._cut(_vector(prediction)) for prediction in predictor.encode(outputs, self._parts)]
        tokens = sum(count_tokens(part.arrays) for part in self._parts)
        data = [
            {"object": "embedding", "index": index, "embedding": self._written(vector)}
            for index, vector in enumerate(vectors)
        ]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        body = {"object": "list", "data": data, "model": self.request.model, "usage": usage}
        return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)

    def _cut(self, vector: Array) -> Array:
        """Cut a vector to the requested size; one of length 1 has length 1 afterwards, too."""
        size = self.request.dimensions
        if size is None or size >= len(vector):
            return vector
        cut = vector[:size]
        is_unit = abs(float(np.linalg.norm(vector)) - 1) < _UNIT_TOLERANCE
        return cut / max(float(np.linalg.norm(cut)), np.finfo(np.float32).tiny) if is_unit else cut

    def _written(self, vector: Array) -> Any:
        if self.request.encoding_format == "float":
            return vector
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()


def check_dimensions(requested: int | None, sizes: Sequence[int]) -> None:
    if requested is None or requested in sizes:
        return
    if not sizes:
        raise InvalidPayload("dimensions: this model was not trained for vectors of other sizes; leave it out")
    raise InvalidPayload(f"dimensions: {requested} is none of the sizes of this model: {', '.join(map(str, sizes))}")


def count_tokens(arrays: Arrays) -> int:
    """Return the tokens of decoded texts, without padding where the model has a mask."""
    if _MASK in arrays:
        return int(np.count_nonzero(arrays[_MASK]))
    return int(arrays[_IDS].size) if _IDS in arrays else 0


def _vector(prediction: Any) -> Array:
    vector = np.asarray(prediction, np.float32)
    if vector.ndim != 1:
        raise ValueError(f"codec.encode returned an array of shape {list(vector.shape)}, not a list of numbers")
    return vector
