"""Predictor of a bundle: codec, signature and session, independent of the wire format."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from importlib import metadata
from typing import Any, Protocol

from pipeline.contract import codec
from pipeline.contract.bundle import Bundle
from pipeline.contract.codec import Array, Part
from pipeline.contract.signature import Drawing, Signature, codec_drawing
from pipeline.system.errors import BundleError, InvalidPayload
from serve.monitoring.metrics import Tokens
from serve.protocol.validate import check_arrays, check_missing
from serve.runtime.session import Session

log = logging.getLogger(__name__)


class CodecError(InvalidPayload):
    """The codec failed to decode a payload. Reported as the client's error; the traceback is logged."""


class TextModel(Protocol):
    """What the rest of the service knows of a loaded language model; `serve/llm` has it."""

    def open(self, bundle: Bundle, pool: Executor) -> TextRunner: ...


class TextRunner(Protocol):
    """Generates the texts of one version."""

    batching: str  # how texts share batches, for the metadata

    def tokens(self) -> Tokens: ...


class Predictor:
    """Turns instances into predictions, with the codec and the session of a bundle.

    Raises InvalidPayload for errors of the client; every other exception is an error of the service.
    """

    def __init__(self, bundle: Bundle, session: Session) -> None:
        self.bundle, self.signature = bundle, bundle.signature
        self.session = session
        self._inputs = tuple(spec.name for spec in bundle.signature.inputs)
        # why requests are not merged into batches; empty where they may be
        self.unbatched_reason = self.signature.unbatched_reason
        self.datatypes = {spec.name: spec.datatype for spec in bundle.signature.outputs}
        _check_installed(bundle)
        reference = bundle.signature.codec
        self._codec: codec.Codec | None = None  # optional for language models, which have a tokenizer
        self._encode: codec.Encode | None = None
        self.redact: codec.Redact | None = None  # what must not be kept of an instance
        self.drawing: Drawing | None = None
        self.embedding_sizes: tuple[int, ...] | None = None  # None: it embeds no texts
        self.media_types: tuple[str, ...] = ()  # of files that are an instance
        if bundle.signature.codec:
            with no_bytecode():
                self._codec = codec.load_bundled_codec(bundle.path, bundle.signature, f"_codec_{bundle.digest}")
            self._encode = codec.encode_method(self._codec, reference)
            self.redact = codec.redact_method(self._codec, reference)
            self.drawing = codec_drawing(self._codec, reference)
            self.embedding_sizes = codec.embedding_sizes(self._codec, reference)
            self.media_types = codec.media_types(self._codec, reference)
        self.language_model: TextModel | None = None
        self.text_signature: Signature | None = None  # for V2 and gRPC, where the codec's instances are strings

    def predict(self, instances: Any) -> Sequence[Any]:
        """Return one prediction for each instance."""
        parts = self.decode(instances)
        return self.encode([self.run(part.arrays) for part in parts], parts)

    def run(self, arrays: Mapping[str, Array], outputs: Sequence[str] | None = None) -> dict[str, Array]:
        """Run inference on validated arrays."""
        return self.session.run(arrays, outputs)

    def encode(self, outputs: Sequence[Mapping[str, Array]], parts: Sequence[Part]) -> Sequence[Any]:
        """Return one prediction for each instance, from the outputs of each part of the request."""
        predictions = [
            self._encode_part(computed, part.decoded, len(part.positions))
            for computed, part in zip(outputs, parts, strict=True)
        ]
        return predictions[0] if len(parts) == 1 else codec.in_order(parts, predictions)

    def _encode_part(self, outputs: Mapping[str, Array], inputs: Mapping[str, Array], count: int) -> Sequence[Any]:
        assert self._encode is not None, "decoding has checked this"
        predictions = self._encode(outputs, inputs)
        if len(predictions) != count:
            raise ValueError(f"codec.encode returned {len(predictions)} predictions for {count} instances")
        return predictions

    def decode(self, instances: Any) -> list[Part]:
        """Turn a client's instances into the arrays of the signature.

        They are one part, unless padding changes answers: then each part has instances of one length.
        """
        if self._codec is None:
            raise InvalidPayload("this model has no codec for instances; use /openai/v1/completions for texts")
        if not isinstance(instances, list):
            raise InvalidPayload("instances: must be a list")
        if not instances:
            raise InvalidPayload("instances: the list is empty")
        if len(instances) > (most := self.signature.limits.max_batch_size):
            raise InvalidPayload(f"instances: {len(instances)} in one request exceed the limit of {most}")
        if self.signature.separate_lengths and len(instances) > 1:
            return codec.join_equal_shapes([self._decode_part([instance]) for instance in instances], self._inputs)
        return [Part.split(range(len(instances)), self._decode_part(instances), self._inputs)]

    def _decode_part(self, instances: list[Any]) -> Mapping[str, Array]:
        assert self._codec is not None
        try:
            arrays = self._codec.decode(instances)
        except InvalidPayload:
            raise
        except OverflowError as error:
            raise InvalidPayload(f"instances: a number is too large: {error}") from None
        except Exception as error:  # user code: most likely the payload is the cause
            raise CodecError("instances: the model's codec cannot decode them") from error
        check_arrays({name: array for name, array in arrays.items() if name in self._inputs}, self.signature)
        check_missing(arrays, self.signature)
        count = len(instances)
        for name, array in arrays.items():
            if array.shape[:1] != (count,):
                raise InvalidPayload(f"instances: {count} were decoded into {name!r} of shape {list(array.shape)}")
        return arrays


def _check_installed(bundle: Bundle) -> None:
    """Raise BundleError for a missing package. Versions may differ: golden requests check the result."""
    for requirement in bundle.signature.requires:
        try:
            metadata.version(requirement.partition("==")[0])
        except metadata.PackageNotFoundError:
            fix = f"to fix it: pip install {requirement}"
            raise BundleError(f"{bundle.path}: its codec needs {requirement}, which is not installed; {fix}") from None


@contextlib.contextmanager
def no_bytecode() -> Iterator[None]:
    """Keep `__pycache__` out of the bundle, which must contain only sealed files."""
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        yield
    finally:
        sys.dont_write_bytecode = before
