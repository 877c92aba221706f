"""From what a client sends to what it gets: codec, signature and session put together, whatever the wire format."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.contract.bundle import Bundle
from pipeline.contract.codec import FILES, Codec, load_codec
from pipeline.contract.errors import BundleError, InvalidPayload
from pipeline.contract.signature import Drawing, codec_drawing
from serve.protocol.validate import check_arrays
from serve.runtime.session import Session

if TYPE_CHECKING:
    from pipeline.contract.signature import Signature
    from serve.generate.model import LanguageModel


Array = np.ndarray[Any, Any]

log = logging.getLogger(__name__)


class CodecError(InvalidPayload):
    """The client's payload, as far as we can know, but a traceback of user code that its author may want to see."""


class Predictor:
    """Raises InvalidPayload where the client is wrong; anything else that is raised is the service's own fault."""

    def __init__(self, bundle: Bundle, session: Session) -> None:
        self.bundle, self.signature = bundle, bundle.signature
        self.session = session
        # why requests are not merged into batches; empty where they are
        self.why_alone = self.signature.why_alone
        self.datatypes = {spec.name: spec.datatype for spec in bundle.signature.outputs}
        _check_installed(bundle)
        reference = f"codec.py:{bundle.signature.codec}"
        self._codec: Codec | None = None  # a language model may do without: its tokenizer is in the bundle
        self.drawing: Drawing | None = None
        if bundle.signature.codec:
            with no_bytecode():
                self._codec = load_codec(reference, bundle.path, f"_codec_{bundle.digest}", bundle.path / FILES)
            self.drawing = codec_drawing(self._codec, reference)
        self.language_model: LanguageModel | None = None  # of a language model
        self.text_signature: Signature | None = None  # of texts through the codec, where its instances are texts

    def predict(self, instances: Any) -> Sequence[Any]:
        """One prediction for each instance."""
        return self.encode(self.run(self.decode(instances)), len(instances))

    def run(self, arrays: Mapping[str, Array], outputs: Sequence[str] | None = None) -> dict[str, Array]:
        """Inference on arrays that were checked already."""
        return self.session.run(arrays, outputs)

    def encode(self, outputs: Mapping[str, Array], count: int) -> Sequence[Any]:
        """One prediction for each of `count` instances."""
        assert self._codec is not None, "what was decoded has a codec"
        predictions = self._codec.encode(outputs)
        if len(predictions) != count:
            raise ValueError(f"codec.encode gave {len(predictions)} predictions for {count} instances")
        return predictions

    def decode(self, instances: Any) -> Mapping[str, Array]:
        """Instances as a client sends them, turned into the arrays of the signature."""
        if self._codec is None:
            raise InvalidPayload("this model has no codec for instances; ask /openai/v1/completions for texts")
        if not isinstance(instances, list):
            raise InvalidPayload("instances: must be a list")
        if not instances:
            raise InvalidPayload("instances: the list is empty")
        if len(instances) > (most := self.signature.limits.max_batch_size):
            raise InvalidPayload(f"instances: {len(instances)} in one request exceed the limit of {most}")
        try:
            arrays = self._codec.decode(instances)
        except InvalidPayload:
            raise
        except Exception as error:  # a codec is user code: what it stumbles over is, as far as we can know, the payload
            raise CodecError("instances: the model's codec cannot decode them") from error
        check_arrays(arrays, self.signature)
        count = len(instances)
        for name, array in arrays.items():
            if array.shape[:1] != (count,):
                raise InvalidPayload(f"instances: {count} were decoded to {name!r} of shape {list(array.shape)}")
        return arrays


def _check_installed(bundle: Bundle) -> None:
    """That a package has another version than at export is for the golden requests to judge."""
    for requirement in bundle.signature.requires:
        try:
            metadata.version(requirement.partition("==")[0])
        except metadata.PackageNotFoundError:
            raise BundleError(
                f"{bundle.path}: its codec needs {requirement}, and there is none here; `pip install {requirement}`"
            ) from None


@contextlib.contextmanager
def no_bytecode() -> Iterator[None]:
    """Importing the codec must not leave `__pycache__` in the bundle: no file may be there that is not sealed."""
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        yield
    finally:
        sys.dont_write_bytecode = before
