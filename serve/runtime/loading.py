"""Load a bundle so that it may answer: verify it, load it, run its golden requests, warm it up at every batch size."""

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
from serve.runtime.selfcheck import merging_problem, verify
from serve.runtime.session import Provider, Session

log = logging.getLogger(__name__)

Array = np.ndarray[Any, Any]


def load_predictor(bundle: Bundle, provider: Provider | None, threads: int | None) -> Predictor:
    """Raise whatever is wrong with the bundle here, before any request reaches it."""
    predictor = Predictor(bundle, Session(bundle, provider, threads))
    verify(bundle, predictor)
    predictor.unbatched_reason = predictor.unbatched_reason or check_batching(bundle, predictor)
    warm_up(bundle, predictor)
    predictor.text_signature = v2.text_signature(bundle.signature, bundle.golden().instances)
    if bundle.signature.generation is not None:
        from serve.generate.model import load_language_model  # most models are no language models

        predictor.language_model = load_language_model(bundle, predictor.session)
    return predictor


def check_batching(bundle: Bundle, predictor: Predictor) -> str:
    """Return why requests must not be merged into batches: only where that was seen to change no answer they are."""
    most = bundle.signature.runtime.batch_rows
    reason = merging_problem(bundle.golden(), predictor.run, most)
    if reason and most > 1:
        log.warning("model=%s batching=off reason=%r", bundle.name, reason)
    return reason


def warm_up(bundle: Bundle, predictor: Predictor) -> None:
    """Run every batch size once: ONNX Runtime plans its memory at the first, and no client is to wait for that."""
    inputs = bundle.golden().inputs
    for rows in [] if predictor.unbatched_reason else batch_sizes(bundle.signature):
        try:
            predictor.run(resize_inputs(inputs, bundle.signature, rows))
        except Exception as error:  # ONNX Runtime raises a dozen types without a common base
            raise BundleError(
                f"{bundle.path}: the model cannot run a batch of {rows}, as requests that wait together would be: "
                f"{' '.join(str(error).split())}; to fix it: set serve.batch_rows=1 and export again"
            ) from error


def batch_sizes(signature: Signature) -> list[int]:
    """Return the powers of two up to the largest merged batch; none where requests are not merged."""
    if signature.unbatched_reason:
        return []
    largest = signature.runtime.batch_rows
    return [*(1 << power for power in range(largest.bit_length()) if 1 << power < largest), largest]


def resize_inputs(inputs: Mapping[str, Array], signature: Signature, rows: int) -> dict[str, Array]:
    """Repeat or cut the golden inputs to that many rows."""
    return {spec.name: np.resize(inputs[spec.name], (rows, *inputs[spec.name].shape[1:])) for spec in signature.inputs}
