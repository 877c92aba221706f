"""Golden requests: what the bundle was asked at export, through its graph, its codec and by greedy generation."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from export.language_parity import prompts_of, settled
from export.parity import Arrays, open_session, run
from pipeline.spec.codec import Codec
from pipeline.spec.config import Config
from pipeline.spec.data import Samples
from pipeline.spec.errors import ConfigError
from pipeline.spec.golden import Golden
from pipeline.spec.greedy import Decoder, empty_past, inputs_of, padded
from pipeline.spec.signature import NUMPY_TYPES, Signature, TensorSpec
from pipeline.spec.task import Generates, HasExample, Task


def golden(
    bundle: Path, task: Task, test: Samples, codec: Codec, signature: Signature, config: Config, error: float
) -> Golden:
    """`error`: what other processors may answer otherwise, where that is more than the tolerances of the export."""
    session = open_session(bundle / "model.onnx")
    decoder = _decoder(session, signature)
    if decoder is not None and isinstance(task, Generates):
        prompts = prompts_of(task.prompting().prompts, test, decoder.generation)[: config.export.golden]
        inputs = _with_past(decoder, prompts)
        generated = [{"prompt": prompt, "answer": settled(decoder, prompt, config.export)} for prompt in prompts]
    else:
        batch = test.batch(range(min(config.export.golden, len(test))))
        inputs, generated = {name: batch[name].numpy() for name in task.inputs}, []
    instances, predictions = _through_codec(session, task, codec, signature)
    return Golden(
        inputs=inputs,
        outputs=run(session, inputs),
        instances=_plain(instances, "example()"),
        predictions=_plain(predictions, "encode()"),
        rtol=config.export.rtol,
        atol=max(config.export.atol, error),
        generated=generated,
    )


def _decoder(session: onnxruntime.InferenceSession, signature: Signature) -> Decoder | None:
    if signature.generation is None:
        return None
    return Decoder(lambda feed: run(session, feed), signature.generation, signature.input_specs)


def _with_past(decoder: Decoder, prompts: list[list[int]]) -> Arrays:
    """Prompts whose first half was read before the rest is asked, so that a cache is part of the request."""
    ids, mask = padded(prompts)
    half = ids.shape[1] // 2
    past: Arrays = empty_past(decoder, len(prompts))
    if half:
        read = decoder.run(inputs_of(decoder.generation, ids[:, :half], mask[:, :half], past))
        past = {cache.input: read[cache.output] for cache in decoder.generation.caches}
    return inputs_of(decoder.generation, ids[:, half:], mask, past)


def _through_codec(
    session: onnxruntime.InferenceSession, task: Task, codec: Codec, signature: Signature
) -> tuple[list[Any], list[Any]]:
    instances = list(task.example()) if isinstance(task, HasExample) else []
    if not instances:
        return [], []
    arrays = codec.decode(instances)
    check_decoded(arrays, signature.inputs, len(instances))
    predictions = list(codec.encode(run(session, arrays)))
    if len(predictions) != len(instances):
        raise ConfigError(f"codec: encode() gives {len(predictions)} predictions for {len(instances)} instances")
    return instances, predictions


def check_decoded(arrays: Any, specs: tuple[TensorSpec, ...], count: int) -> None:
    """What the codec makes of the example is what the model takes."""
    if not isinstance(arrays, Mapping):
        raise ConfigError(f"codec: decode() gives {type(arrays).__name__}, not a mapping of input names to arrays")
    for spec in specs:
        array = arrays.get(spec.name)
        if not isinstance(array, np.ndarray):
            raise ConfigError(f"codec: decode() gives no array `{spec.name}`, which the model takes")
        if array.dtype != NUMPY_TYPES[spec.datatype]:
            raise ConfigError(f"codec: decode() gives `{spec.name}` as {array.dtype}, the model takes {spec.datatype}")
        fits = len(array.shape) == len(spec.shape) and array.shape[0] == count and all(
            isinstance(want, str) or want == have for want, have in zip(spec.shape, array.shape, strict=True)
        )  # fmt: skip
        if not fits:
            raise ConfigError(f"codec: decode() gives `{spec.name}` of shape {list(array.shape)}, the model takes {list(spec.shape)}")  # fmt: skip  # noqa: E501


def _plain(value: list[Any], what: str) -> list[Any]:
    try:
        plain: list[Any] = json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{what} must give plain JSON values: {error}") from error
    return plain
