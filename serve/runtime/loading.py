"""Load a bundle so that it may answer: verify it, load it, run its golden requests, warm it up at every batch size."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import numpy as np

from pipeline.contract.bundle import Bundle
from pipeline.contract.codec import Array
from pipeline.contract.signature import Signature
from pipeline.system.errors import BundleError
from serve.protocol import v2
from serve.runtime.predictor import Predictor
from serve.runtime.selfcheck import merging_problem, other_rows, tensor_difference, verify
from serve.runtime.session import Provider, Session

log = logging.getLogger(__name__)


def load_predictor(bundle: Bundle, provider: Provider | None = None, threads: int | None = None) -> Predictor:
    """Raise whatever is wrong with the bundle here, before any request reaches it."""
    predictor = Predictor(bundle, Session(bundle, provider, threads))
    verify(bundle, predictor)
    predictor.unbatched_reason = predictor.unbatched_reason or check_batching(bundle, predictor)
    capture_graphs(bundle, predictor)
    warm_up(bundle, predictor)
    predictor.text_signature = v2.text_signature(bundle.signature, bundle.golden().instances)
    if bundle.signature.generation is not None:
        from serve.llm.model import load_language_model  # most models are no language models

        predictor.language_model = load_language_model(bundle, predictor.session)
    return predictor


def check_batching(bundle: Bundle, predictor: Predictor) -> str:
    """Return why requests must not be merged into batches: only where that was seen to change no answer they are."""
    most = bundle.signature.runtime.batch_rows
    reason = merging_problem(bundle.golden(), predictor.run, most)
    if reason and most > 1:
        log.warning("model=%s batching=off reason=%r", bundle.name, reason)
    return reason


def capture_graphs(bundle: Bundle, predictor: Predictor) -> None:
    """Run batches of fixed shapes as CUDA graphs, if these give the same answers to inputs that they have not seen."""
    batches = fixed_batches(bundle, predictor) if predictor.session.can_capture else []
    if not batches:
        return
    golden = bundle.golden()
    try:
        session = predictor.session.with_graphs(batches)
        for inputs in map(other_rows, batches):
            expected, found = predictor.session.run(inputs), session.run(inputs)
            if wrong := tensor_difference(expected, found, golden.rtol, golden.atol):
                raise BundleError(f"another answer than without: {wrong}")
    except Exception as error:  # ONNX Runtime raises a dozen types without a common base
        log.warning("model=%s cuda-graphs=off reason=%r", bundle.name, " ".join(str(error).split()))
        return
    predictor.session = session
    log.info("model=%s cuda-graphs=%d", bundle.name, len(batches))


def fixed_batches(bundle: Bundle, predictor: Predictor) -> list[Mapping[str, Array]]:
    """Return a batch of each size that requests are merged to; none where other axes vary, or tensors are texts."""
    signature, inputs = bundle.signature, bundle.golden().inputs
    specs = (*signature.inputs, *signature.outputs)
    if signature.generation is not None or any(spec.datatype == "BYTES" for spec in specs):
        return []
    varying = {(position, axis) for spec in specs for position, axis in enumerate(spec.shape) if isinstance(axis, str)}
    if not varying:
        return [inputs]
    if signature.unbatched_reason or any(position for position, _ in varying):
        return []
    sizes = [1] if predictor.unbatched_reason else batch_sizes(signature)
    return [resize_inputs(inputs, signature, rows) for rows in sizes]


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
