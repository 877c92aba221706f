"""Fill the bundle: signature, codec, the files it shares with the model, and golden requests.

The codec may import numpy and what it declares, because the service installs nothing else.
"""

from __future__ import annotations

import platform
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from export.conversion.to_onnx import tensor_specs
from export.golden import compare_reference, make_golden
from export.sessions import open_graph
from export.subject import ModelExporter, ModelProperties
from pipeline.contract.bundle import PROVENANCE, Manifest, statement
from pipeline.contract.codec import FILES, build_codec, codec_class, required_packages, shared_files
from pipeline.contract.config import Config
from pipeline.contract.run import Run
from pipeline.contract.settings.bundled import BUNDLED_SETTINGS
from pipeline.contract.signature import CODEC_FOLDER, FLOATS, Limits, Runtime, Signature, TensorSpec, codec_file
from pipeline.contract.task import Classifier
from pipeline.system.errors import ConfigError
from pipeline.system.files import digest_mapping, read_object, write_json
from pipeline.system.sources import package_sources, project_sources, third_party_imports

_PACKAGES = ("torch", "onnx", "onnxscript", "onnxruntime", "onnxruntime-gpu", "numpy", "safetensors")
_SECTIONS = ("name", "task", "codec", "prepare", "model", "train", "evaluate", "export")  # of the settings


@dataclass(frozen=True)
class Sources:
    """Where the bundle's parts that are not computed come from."""

    root: Path  # the project
    files: Path  # what model, data and codec share


def fill_bundle(
    bundle: Path, exporter: ModelExporter, config: Config, sources: Sources, properties: ModelProperties
) -> Signature:
    """Write signature, codec, shared files and golden requests beside model.onnx; the caller writes the rest."""
    task, test = exporter.subject.task, exporter.subject.test
    codec_type = codec_class(config.codec, sources.root)
    requires = check_requirements(config.codec, sources.root, required_packages(codec_type, config.codec))
    codec_name = _bundled_name(config.codec, sources.root)
    classes = task.classes if isinstance(task, Classifier) else ()
    signature = _signature(bundle, config, exporter.complete(properties, sources.files), codec_name, requires, classes)
    (bundle / "signature.json").write_text(signature.model_dump_json(indent=2) + "\n")
    _copy_codec(bundle, codec_name, config.codec, sources.root)
    _copy_files(bundle, shared_files(codec_type, config.codec), sources.files)
    codec = build_codec(codec_type, config.codec, bundle / FILES)
    exporter.check_bundle(bundle, signature)
    graph = open_graph(bundle / "model.onnx")
    inputs = exporter.golden_inputs(graph, signature, properties.rounding)
    golden = make_golden(graph, inputs, task, test, codec, signature, config.export, properties.rounding)
    golden.write(bundle)
    if compared := compare_reference(task, exporter.subject.model, golden):
        print(compared, flush=True)
    return signature


def columns_with_nan(profile: Path) -> frozenset[str]:
    """Return the columns that had NaN in any split, as prepare counted them."""
    splits = read_object(profile, "columns").values()
    columns = [item for split in splits for item in split.items()]
    return frozenset(name for name, column in columns if column["nan"])


def _signature(
    bundle: Path,
    config: Config,
    properties: ModelProperties,
    codec: str,
    requires: tuple[str, ...],
    classes: Sequence[Any],
) -> Signature:
    inputs, outputs = tensor_specs(bundle / "model.onnx")
    missing = {spec.name for spec in inputs if spec.datatype in FLOATS} & properties.missing
    limits, runtime = (config.serve.model_dump(include=set(kind.model_fields)) for kind in (Limits, Runtime))
    return Signature(
        inputs=tuple(spec.model_copy(update={"allows_missing": spec.name in missing}) for spec in inputs),
        outputs=_labelled(outputs, classes),
        codec=codec,
        requires=requires,
        limits=Limits(**limits, axes=properties.axes, shortest=properties.shortest),
        runtime=Runtime(**runtime),
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


_ALWAYS_INSTALLED = {"numpy"}
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
        message = f'{reference}: `requires` has {text!r}; write a package\'s name, as in "tokenizers"'
        raise ConfigError(message) from error
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


def write_provenance(bundle: Path, run: Run, signature: Signature) -> None:
    """Write provenance.json; the manifest must exist, because it is one of the subjects."""
    raw = (bundle / "manifest.json").read_bytes()
    config = run.original_config.model_dump(mode="json")  # as the run was started; its results are identified by it
    properties: dict[str, Any] = {name: config[name] for name in _SECTIONS}
    properties["serve"] = {name: config["serve"][name] for name in BUNDLED_SETTINGS}
    pins = (pin.partition("==") for pin in signature.requires)
    packages = _versions(_PACKAGES) | {name: version for name, _, version in pins}
    source = digest_mapping(package_sources("export", "pipeline.contract", "pipeline.statistics", "pipeline.system"))
    builder = {"python": platform.python_version(), "source": source}
    builder |= _versions(("pipe-road",))
    write_json(bundle / PROVENANCE, statement(Manifest.model_validate_json(raw), raw, properties, packages, builder))


def _versions(names: tuple[str, ...]) -> dict[str, str]:
    """Return the versions of those that are installed."""
    versions = {}
    for name in names:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions
