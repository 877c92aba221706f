"""Filling the bundle: codec, signature, golden requests, card, and the manifest that seals them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from export.convert import tensor_specs
from export.parity import open_session, run
from pipeline.spec.codec import Codec, load_codec
from pipeline.spec.config import Config
from pipeline.spec.data import Samples
from pipeline.spec.errors import ConfigError
from pipeline.spec.golden import Golden
from pipeline.spec.signature import NUMPY_TYPES, Limits, Runtime, Signature, TensorSpec
from pipeline.spec.sources import project_sources
from pipeline.spec.task import HasExample, Task


def fill(bundle: Path, task: Task, test: Samples, config: Config, root: Path) -> Signature:
    """Everything beside model.onnx, which is there already; the manifest comes last, from the caller."""
    signature = _signature(bundle, config)
    (bundle / "signature.json").write_text(signature.model_dump_json(indent=2) + "\n")
    _copy_codec(bundle, config.codec, root)
    codec = load_codec(config.codec, root)
    _golden(bundle, task, test, codec, signature, config).write(bundle)
    return signature


def _signature(bundle: Path, config: Config) -> Signature:
    inputs, outputs = tensor_specs(bundle / "model.onnx")
    return Signature(
        inputs=inputs,
        outputs=outputs,
        codec=config.codec.partition(":")[2],
        limits=Limits(**config.serve.model_dump(include=set(Limits.model_fields))),
        runtime=Runtime(**config.serve.model_dump(include=set(Runtime.model_fields))),
    )


def _copy_codec(bundle: Path, reference: str, root: Path) -> None:
    """The codec travels alone: the service has no checkout of the project."""
    file = reference.partition(":")[0]
    if others := sorted(set(project_sources(root, reference)) - {Path(file).as_posix()}):
        raise ConfigError(f"{file} imports {', '.join(others)}; a codec travels alone in the bundle: move that code into it")  # fmt: skip  # noqa: E501
    shutil.copyfile(root / file, bundle / "codec.py")


def _golden(
    bundle: Path, task: Task, test: Samples, codec: Codec, signature: Signature, config: Config
) -> Golden:  # fmt: skip
    session = open_session(bundle / "model.onnx")
    batch = test.batch(range(min(config.export.golden, len(test))))
    inputs = {name: batch[name].numpy() for name in task.inputs}
    instances = list(task.example()) if isinstance(task, HasExample) else []
    predictions: list[Any] = []
    if instances:
        arrays = codec.decode(instances)
        check_decoded(arrays, signature.inputs, len(instances))
        predictions = list(codec.encode(run(session, arrays)))
        if len(predictions) != len(instances):
            raise ConfigError(f"codec: encode() gives {len(predictions)} predictions for {len(instances)} instances")
    return Golden(
        inputs=inputs,
        outputs=run(session, inputs),
        instances=_plain(instances, "example()"),
        predictions=_plain(predictions, "encode()"),
        rtol=config.export.rtol,
        atol=config.export.atol,
    )


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
