"""Fill the bundle: signature, codec, the files it shares with the model, and golden requests.

Golden requests are inputs with the outputs of the exported file: through the graph, through the codec and, for
language models, by greedy generation. The codec may import numpy and what it declares, because the service installs
nothing else; the tokenizer may give only ids that the model has.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from export.language_model import choose_prompts, complete_generation, stable_answer
from export.parity import Arrays, open_session, rows_with, run
from export.to_onnx import tensor_specs
from export.tolerance import absolute_tolerance
from pipeline.contract.codec import (
    FILES,
    Codec,
    Part,
    build_codec,
    codec_class,
    encode_method,
    in_order,
    join_equal_shapes,
    required_packages,
    shared_files,
)
from pipeline.contract.config import Config
from pipeline.contract.data import Samples
from pipeline.contract.golden import Decoder, Golden, empty_past, inputs_of, null_for_nan, pad
from pipeline.contract.signature import (
    CODEC_FOLDER,
    FLOATS,
    NUMPY_TYPES,
    Generation,
    Limits,
    Runtime,
    Signature,
    TensorSpec,
    codec_file,
)
from pipeline.contract.task import Classifier, Generates, HasExample, HasInstances, Task
from pipeline.system.errors import ConfigError, DataError
from pipeline.system.files import tokenizer_ids
from pipeline.system.sources import project_sources, third_party_imports


@dataclass(frozen=True)
class Sources:
    """Where the bundle's parts that are not computed come from."""

    root: Path  # the project
    files: Path  # what model, data and codec share


@dataclass(frozen=True)
class ModelProperties:
    """Properties of the model that its graph does not hold."""

    axes: Mapping[str, int] = field(default_factory=dict)  # maximum size of each named axis
    generation: Generation | None = None
    variant: str = "fp32"
    error: float = 0.0  # tolerance for processors that round this variant differently
    padding: str = ""  # how padding changes answers, or that it is unknown
    missing: frozenset[str] = frozenset()  # columns whose data have NaN


def fill_bundle(
    bundle: Path, task: Task, test: Samples, config: Config, sources: Sources, properties: ModelProperties
) -> Signature:
    """Write everything except model.onnx, which is there already, and the manifest, which the caller writes last."""
    kind = codec_class(config.codec, sources.root)
    requires = check_requirements(config.codec, sources.root, required_packages(kind, config.codec))
    codec_name = _bundled_name(config.codec, sources.root)
    if properties.generation is not None and isinstance(task, Generates):
        generation = complete_generation(properties.generation, task, sources.files)
        properties = replace(properties, generation=generation)
    signature = _signature(bundle, config, properties, requires)
    outputs = _labelled(signature.outputs, task.classes if isinstance(task, Classifier) else ())
    signature = signature.model_copy(update={"codec": codec_name, "outputs": outputs})
    (bundle / "signature.json").write_text(signature.model_dump_json(indent=2) + "\n")
    _copy_codec(bundle, codec_name, config.codec, sources.root)
    _copy_files(bundle, shared_files(kind, config.codec), sources.files)
    codec = build_codec(kind, config.codec, bundle / FILES)
    check_tokenizer(bundle, signature)
    make_golden(bundle, task, test, codec, signature, config, properties.error).write(bundle)
    return signature


def columns_with_nan(profile: Path) -> frozenset[str]:
    """Return the columns that had NaN in any split, as prepare counted them."""
    splits = json.loads(profile.read_text())["columns"].values()
    columns = [item for split in splits for item in split.items()]
    return frozenset(name for name, column in columns if column.get("nan", column["missing"]))


def _signature(bundle: Path, config: Config, properties: ModelProperties, requires: tuple[str, ...] = ()) -> Signature:
    inputs, outputs = tensor_specs(bundle / "model.onnx")
    missing = {spec.name for spec in inputs if spec.datatype in FLOATS} & properties.missing
    return Signature(
        inputs=tuple(spec.model_copy(update={"allows_missing": spec.name in missing}) for spec in inputs),
        outputs=outputs,
        codec=config.codec.partition(":")[2],
        requires=requires,
        limits=Limits(**config.serve.model_dump(include=set(Limits.model_fields)), axes=properties.axes),
        runtime=Runtime(**config.serve.model_dump(include=set(Runtime.model_fields))),
        generation=properties.generation,
        variant=properties.variant,
        padding=properties.padding,
        separate_lengths=bool(properties.padding),
    )


def _labelled(outputs: Sequence[TensorSpec], classes: Sequence[Any]) -> tuple[TensorSpec, ...]:
    """Give the names of the classes to the outputs that have a value for each."""
    labels = tuple(map(str, classes))
    return tuple(
        spec.model_copy(update={"labels": labels}) if len(spec.shape) == 2 and spec.shape[1] == len(labels) else spec
        for spec in outputs
    )


def _bundled_name(reference: str, root: Path) -> str:
    """Return the codec as the signature names it: by its class alone if it is a single file."""
    file, _, name = reference.partition(":")
    return name if len(project_sources(root, reference)) == 1 else f"{Path(file).as_posix()}:{name}"


def _copy_codec(bundle: Path, codec: str, reference: str, root: Path) -> None:
    """Copy the codec and the files it imports: the service has no checkout of the project."""
    for file in project_sources(root, reference):
        target = bundle / (f"{CODEC_FOLDER}/{file}" if ":" in codec else codec_file(codec))
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(root / file, target)


def _copy_files(bundle: Path, names: Sequence[str], source: Path) -> None:
    for name in names:
        if not (source / name).is_file():
            raise ConfigError(f"codec: needs the file {name}, which the task's make_files() did not write")
        (bundle / FILES / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, bundle / FILES / name)


def make_golden(
    bundle: Path, task: Task, test: Samples, codec: Codec, signature: Signature, config: Config, error: float
) -> Golden:
    """Return the golden requests; `error` widens the tolerance for processors that round differently."""
    session = open_session(bundle / "model.onnx")
    decoder = _decoder(session, signature)
    if decoder is not None and isinstance(task, Generates):
        prompts = choose_prompts(task.prompting().prompts, test, decoder.generation)[:GOLDEN_REQUESTS]
        inputs = _with_past(decoder, prompts)
        generated = [
            {"prompt": prompt, "answer": stable_answer(decoder, prompt, config.export, error)} for prompt in prompts
        ]
    else:
        batch = test.batch(choose_samples(test, task.inputs, signature.missing_inputs))
        inputs, generated = {name: batch[name].numpy() for name in task.inputs}, []
    instances, predictions = _run_codec(session, task, codec, signature, test)
    outputs = run(session, inputs)
    return Golden(
        inputs=inputs,
        outputs=outputs,
        instances=instances,
        predictions=predictions,
        rtol=config.export.rtol,
        atol=max(absolute_tolerance(config.export, [*outputs.values(), *_numbers(predictions)]), error),
        generated=generated,
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
    finite: list[int] = []
    with_nan: list[int] = []
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


def _decoder(session: onnxruntime.InferenceSession, signature: Signature) -> Decoder | None:
    if signature.generation is None:
        return None
    return Decoder(lambda feed: run(session, feed), signature.generation, signature.input_specs)


def _with_past(decoder: Decoder, prompts: list[list[int]]) -> Arrays:
    """Return inputs that continue prompts whose first half is in the cache already."""
    ids, mask = pad(prompts)
    length = ids.shape[1] // 2
    past: Arrays = empty_past(decoder, len(prompts))
    if length:
        read = decoder.run(inputs_of(decoder.generation, ids[:, :length], mask[:, :length], past))
        past = {cache.input: read[cache.output] for cache in decoder.generation.caches}
    return inputs_of(decoder.generation, ids[:, length:], mask, past)


def _run_codec(
    session: onnxruntime.InferenceSession, task: Task, codec: Codec, signature: Signature, test: Samples
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
    answers = [list(encode(run(session, part.arrays), part.arrays)) for part in parts]
    for part, answer in zip(parts, answers, strict=True):
        if len(answer) != len(part.positions):
            raise ConfigError(f"codec: encode() gives {len(answer)} predictions for {len(part.positions)} instances")
    predictions = in_order(parts, answers)
    return instances, _plain_json(null_for_nan(predictions) if signature.missing_inputs else predictions, "encode()")


def _decode_parts(codec: Codec, instances: list[Any], signature: Signature) -> list[Part]:
    """Decode the instances as the service does: one by one if padding changes answers, else together."""

    def decode(some: list[Any]) -> dict[str, Any]:
        arrays = codec.decode(some)
        check_decoded(arrays, signature.inputs, len(some))
        return dict(arrays)

    if signature.separate_lengths:
        return join_equal_shapes([decode([instance]) for instance in instances])
    return [Part(range(len(instances)), decode(instances))]


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


_ALWAYS_INSTALLED = {"numpy"}
GOLDEN_REQUESTS = 4
_SEARCHED_ROWS = 256  # at once, for a sample with a missing number
_FORBIDDEN = {"torch", "transformers"}  # gigabytes in a service that runs on ONNX Runtime


def check_requirements(reference: str, root: Path, declared: tuple[str, ...]) -> tuple[str, ...]:
    """Pin the declared packages to the versions installed here; reject imports the service could not make."""
    pins = tuple(_pin(reference, text) for text in declared)
    allowed = _ALWAYS_INSTALLED | {canonicalize_name(pin.partition("==")[0]) for pin in pins}
    importers = third_party_imports(root, reference)
    owners = metadata.packages_distributions() if importers.keys() - _ALWAYS_INSTALLED else {}
    for module, file in sorted(importers.items()):
        names = {canonicalize_name(name) for name in owners.get(module, [module])}
        if not names & allowed:
            raise ConfigError(
                f"{reference}: {file} imports {module}, which the service does not install; declare it in the codec's "
                f'class, as in requires = ("{min(names)}",), or do without'
            )
    return pins


def _pin(reference: str, text: str) -> str:
    try:
        requirement = Requirement(text)
    except InvalidRequirement as error:
        raise ConfigError(
            f'{reference}: `requires` has {text!r}; write a package\'s name, as in "tokenizers"'
        ) from error
    name = canonicalize_name(requirement.name)
    if name in _FORBIDDEN:
        raise ConfigError(f"{reference}: `requires` has {name}, which is too large for a service; decode without it")
    try:
        version = Version(metadata.version(name))
    except metadata.PackageNotFoundError:
        raise ConfigError(f"{reference}: needs {text}, which is not installed here; `pip install {name}`") from None
    if not requirement.specifier.contains(version, prereleases=True):
        raise ConfigError(f"{reference}: needs {text}, but {version} is installed here")
    return f"{name}=={version.public}"


def check_tokenizer(bundle: Path, signature: Signature) -> None:
    """Check that every id of a language model's tokenizer is one the model has."""
    generation = signature.generation
    if generation is None:
        return
    path = bundle / generation.tokenizer
    if not path.is_file():
        raise ConfigError(
            f"the bundle of a language model needs {generation.tokenizer}: let the task's make_files() write it, and "
            'name it in the codec, as in files = ("tokenizer.json",)'
        )
    logits = next(spec for spec in signature.outputs if spec.name == generation.logits)
    vocabulary_size, highest = logits.shape[-1], max((*tokenizer_ids(path), *generation.begin, *generation.end))
    if isinstance(vocabulary_size, int) and highest >= vocabulary_size:
        raise ConfigError(
            f"{path.name}: has the id {highest}, but the model knows {vocabulary_size} ids (0 to {vocabulary_size - 1})"
        )
