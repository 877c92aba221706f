"""Filling the bundle: signature, codec, the files it shares with the model, and golden requests."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from export.convert import tensor_specs
from export.golden import golden
from export.requirements import check_requirements
from export.tokens import check_tokenizer
from pipeline.spec.codec import FILES, build_codec, codec_class, required, shared_files
from pipeline.spec.config import Config
from pipeline.spec.data import Samples
from pipeline.spec.errors import ConfigError
from pipeline.spec.generation import Generation
from pipeline.spec.signature import Limits, Runtime, Signature
from pipeline.spec.sources import project_sources
from pipeline.spec.task import Task


@dataclass(frozen=True)
class Sources:
    """Where the bundle's parts that are not computed come from."""

    root: Path  # the project
    files: Path  # what model, data and codec share


@dataclass(frozen=True)
class Said:
    """What is known of the model beside its graph."""

    axes: Mapping[str, int] = field(default_factory=dict)  # how long each may be
    generation: Generation | None = None
    variant: str = "fp32"
    error: float = 0.0  # what another processor may answer otherwise, where it rounds the variant its own way


def fill(bundle: Path, task: Task, test: Samples, config: Config, sources: Sources, said: Said) -> Signature:
    """Everything beside model.onnx, which is there already; the manifest comes last, from the caller."""
    kind = codec_class(config.codec, sources.root)
    requires = check_requirements(config.codec, sources.root, required(kind, config.codec))
    signature = _signature(bundle, config, said, requires)
    (bundle / "signature.json").write_text(signature.model_dump_json(indent=2) + "\n")
    _copy_codec(bundle, config.codec, sources.root)
    _copy_files(bundle, shared_files(kind, config.codec), sources.files)
    codec = build_codec(kind, config.codec, bundle / FILES)
    check_tokenizer(bundle, signature)
    golden(bundle, task, test, codec, signature, config, said.error).write(bundle)
    return signature


def _signature(bundle: Path, config: Config, said: Said, requires: tuple[str, ...] = ()) -> Signature:
    inputs, outputs = tensor_specs(bundle / "model.onnx")
    return Signature(
        inputs=inputs,
        outputs=outputs,
        codec=config.codec.partition(":")[2],
        requires=requires,
        limits=Limits(**config.serve.model_dump(include=set(Limits.model_fields)), axes=said.axes),
        runtime=Runtime(**config.serve.model_dump(include=set(Runtime.model_fields))),
        generation=said.generation,
        variant=said.variant,
    )


def _copy_codec(bundle: Path, reference: str, root: Path) -> None:
    """The codec travels alone: the service has no checkout of the project."""
    file = reference.partition(":")[0]
    if others := sorted(set(project_sources(root, reference)) - {Path(file).as_posix()}):
        raise ConfigError(f"{file} imports {', '.join(others)}; a codec travels alone in the bundle: move that code into it")  # fmt: skip  # noqa: E501
    shutil.copyfile(root / file, bundle / "codec.py")


def _copy_files(bundle: Path, names: Sequence[str], source: Path) -> None:
    for name in names:
        if not (source / name).is_file():
            raise ConfigError(f"codec: wants the file {name}, which the task's make_files() did not write")
        (bundle / FILES / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, bundle / FILES / name)
