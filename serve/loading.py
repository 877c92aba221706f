"""A bundle becomes something that may answer: verified, loaded, asked its golden requests, warm at every size."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np

from pipeline.contract.bundle import Bundle
from pipeline.contract.errors import BundleError
from pipeline.contract.signature import Signature
from serve.protocol import v2
from serve.runtime.predictor import Predictor
from serve.runtime.selfcheck import verify, why_not_merged
from serve.runtime.session import Provider, Session

log = logging.getLogger(__name__)

Array = np.ndarray[Any, Any]


def prove(bundle: Bundle, provider: Provider | None, threads: int | None) -> Predictor:
    """Whatever is wrong with it is raised here, before anybody's request meets it."""
    predictor = Predictor(bundle, Session(bundle, provider, threads))
    verify(bundle, predictor)
    predictor.why_alone = predictor.why_alone or why_alone(bundle, predictor)
    warm(bundle, predictor)
    predictor.spoken = v2.signature_of(bundle.signature, bundle.golden().instances)
    if bundle.signature.generation is not None:
        from serve.generate.model import words_of  # here, not above: most models have no words, and need no tokenizer

        predictor.words = words_of(bundle, predictor.session)
    return predictor


def why_alone(bundle: Bundle, predictor: Predictor) -> str:
    """Requests run together only where that was seen to change no answer."""
    most = bundle.signature.runtime.batch_rows
    reason = why_not_merged(bundle.golden(), predictor.run, most)
    if reason and most > 1:
        log.warning("model=%s batching=off reason=%r", bundle.name, reason)
    return reason


def warm(bundle: Bundle, predictor: Predictor) -> None:
    """ONNX Runtime plans its memory anew at the first batch of a size: no client has to wait for that."""
    inputs = bundle.golden().inputs
    for rows in [] if predictor.why_alone else buckets(bundle.signature):
        try:
            predictor.run(resized(inputs, bundle.signature, rows))
        except Exception as error:  # ONNX Runtime raises a dozen types without a common base
            raise BundleError(
                f"{bundle.path}: the model cannot run a batch of {rows}, as requests that wait together would be: "
                f"{' '.join(str(error).split())}; set serve.batch_rows=1 and export again, or mend the model"
            ) from error


def buckets(signature: Signature) -> list[int]:
    """The powers of two up to the largest batch that requests are merged to; none where batches have no axis."""
    if signature.why_alone:
        return []
    most = signature.runtime.batch_rows
    return [*(1 << power for power in range(most.bit_length()) if 1 << power < most), most]


def resized(inputs: Mapping[str, Array], signature: Signature, rows: int) -> dict[str, Array]:
    """The golden inputs, repeated or cut to that many rows."""
    return {spec.name: np.resize(inputs[spec.name], (rows, *inputs[spec.name].shape[1:])) for spec in signature.inputs}
