"""Golden requests: inputs with the outputs of the exported file, through the graph and through the codec."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import nn

from export.checks.cases import to_feed
from export.compare import Arrays, Graph, rows_with
from export.tolerance import absolute_tolerance
from pipeline.contract.codec import Codec, Part, encode_method, in_order, join_equal_shapes
from pipeline.contract.data import Samples
from pipeline.contract.golden import Golden, difference, null_for_nan
from pipeline.contract.settings.stages import Export
from pipeline.contract.signature import NUMPY_TYPES, Signature, TensorSpec
from pipeline.contract.task import HasExample, HasInstances, HasReference, Task
from pipeline.system.errors import ConfigError, DataError, StageError

GOLDEN_REQUESTS = 4
_SHOWN = 200  # characters of an answer in a message
_SEARCHED_ROWS = 256  # at once, for a sample with a missing number


@dataclass(frozen=True)
class GoldenInputs:
    """The inputs of the raw protocol; for a language model, also prompts with their answers."""

    inputs: Arrays
    generated: list[dict[str, list[int]]] = field(default_factory=list)


def sample_inputs(task: Task, test: Samples, signature: Signature) -> GoldenInputs:
    batch = test.batch(choose_samples(test, task.inputs, signature.missing_inputs))
    return GoldenInputs(to_feed(task, batch))


def make_golden(
    graph: Graph,
    golden: GoldenInputs,
    task: Task,
    test: Samples,
    codec: Codec,
    signature: Signature,
    config: Export,
    rounding: float,
) -> Golden:
    """Return the golden requests; `rounding` widens the tolerance for processors that round differently."""
    instances, predictions = _run_codec(graph, task, codec, signature, test)
    outputs = graph(golden.inputs)
    return Golden(
        inputs=golden.inputs,
        outputs=outputs,
        instances=instances,
        predictions=predictions,
        rtol=config.rtol,
        atol=max(absolute_tolerance(config, [*outputs.values(), *_numbers(predictions)]), rounding),
        generated=golden.generated,
    )


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _numbers(item)
    elif isinstance(value, float):
        yield value


def choose_samples(test: Samples, inputs: Sequence[str], missing: Sequence[str]) -> list[int]:
    """Return the first samples without infinite numbers, which JSON does not have; one has a missing number if any has.

    `missing` names the inputs that may have missing numbers.
    """
    finite, with_nan = list[int](), list[int]()
    start, rows = 0, GOLDEN_REQUESTS
    while start < len(test) and (len(finite) < GOLDEN_REQUESTS or (missing and not with_nan)):
        batch = test.batch(range(start, min(start + rows, len(test))))
        is_finite = ~rows_with(np.isinf, [batch[name].numpy() for name in inputs])
        finite += (start + np.flatnonzero(is_finite)).tolist()
        if missing:
            has_nan = rows_with(np.isnan, [batch[name].numpy() for name in missing])
            with_nan += (start + np.flatnonzero(is_finite & has_nan)).tolist()
        start, rows = start + rows, _SEARCHED_ROWS
    if not finite:
        raise DataError(
            "data('test'): every sample has an infinite number in an input, which JSON requests cannot have; "
            "replace infinite numbers, or let NaN stand for missing ones"
        )
    chosen = finite[:GOLDEN_REQUESTS]
    if with_nan and not set(chosen) & set(with_nan):
        chosen[-1] = with_nan[0]
    return chosen


def _run_codec(
    graph: Graph, task: Task, codec: Codec, signature: Signature, test: Samples
) -> tuple[list[Any], list[Any]]:
    """Return example(), else raw test instances, and the predictions in JSON, where null stands for missing numbers."""
    given: list[Any] = []
    if isinstance(task, HasExample):
        given = list(task.example())
    elif isinstance(task, HasInstances):
        given = list(task.instances(test.batch(range(min(GOLDEN_REQUESTS, len(test))))))
    instances: list[Any] = _plain_json(null_for_nan(given), "example() or instances()")
    if not instances:
        return [], []
    encode = encode_method(codec, f"codec {signature.codec}")
    parts = _decode_parts(codec, instances, signature)
    answers = [list(encode(graph(part.arrays), part.decoded)) for part in parts]
    for part, answer in zip(parts, answers, strict=True):
        if len(answer) != len(part.positions):
            raise ConfigError(f"codec: encode() gives {len(answer)} predictions for {len(part.positions)} instances")
    predictions = in_order(parts, answers)
    return instances, _plain_json(null_for_nan(predictions) if signature.missing_inputs else predictions, "encode()")


def _decode_parts(codec: Codec, instances: list[Any], signature: Signature) -> list[Part]:
    """Decode the instances as the service does: one by one if padding changes answers, else together."""

    inputs = [spec.name for spec in signature.inputs]

    def decode(some: list[Any]) -> dict[str, Any]:
        arrays = codec.decode(some)
        check_decoded(arrays, signature.inputs, len(some))
        return dict(arrays)

    if signature.separate_lengths:
        return join_equal_shapes([decode([instance]) for instance in instances], inputs)
    return [Part.split(range(len(instances)), decode(instances), inputs)]


def check_decoded(arrays: Any, specs: tuple[TensorSpec, ...], count: int) -> None:
    """Check that the decoded example fits the inputs of the model."""
    if not isinstance(arrays, Mapping):
        raise ConfigError(f"codec: decode() gives {type(arrays).__name__}, not a mapping of input names to arrays")
    for spec in specs:
        array = arrays.get(spec.name)
        if not isinstance(array, np.ndarray):
            raise ConfigError(f"codec: decode() gives no array `{spec.name}`, which the model takes")
        if array.dtype != NUMPY_TYPES[spec.datatype]:
            raise ConfigError(f"codec: decode() gives `{spec.name}` as {array.dtype}, the model takes {spec.datatype}")
        fits = len(array.shape) == len(spec.shape) and array.shape[0] == count and all(
            isinstance(size, str) or size == actual for size, actual in zip(spec.shape, array.shape, strict=True)
        )  # fmt: skip
        if not fits:
            raise ConfigError(f"codec: decode() gives `{spec.name}` of shape {list(array.shape)}, the model takes {list(spec.shape)}")  # fmt: skip  # noqa: E501


def _plain_json(value: list[Any], source: str) -> list[Any]:
    try:
        plain: list[Any] = json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{source} must give plain JSON values: {error}") from error
    return plain


def compare_reference(task: Task, model: nn.Module, golden: Golden) -> str:
    """Compare the answers with those of the model's own library; return a sentence, empty without a reference()."""
    if not isinstance(task, HasReference):
        return ""
    answers = list(task.reference(golden.instances, model))
    if len(answers) != len(golden.predictions):
        raise StageError(f"reference(): gives {len(answers)} answers for {len(golden.predictions)} instances")
    for instance, prediction, answer in zip(golden.instances, golden.predictions, answers, strict=True):
        if problem := difference(answer, prediction, golden.rtol, golden.atol):
            texts = [str(value)[:_SHOWN] for value in (prediction, answer, instance)]
            raise StageError(
                f"the bundle answers {texts[0]} and the model's own library {texts[1]} for {texts[2]} ({problem}); "
                "to fix it: correct decode() or encode() in the codec"
            )
    return f"{len(answers)} answers equal to those of the model's own library"
