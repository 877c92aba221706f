"""The provenance of a bundle: settings, package versions and the digest of the exporter's own source."""

from __future__ import annotations

import platform
from importlib import metadata
from pathlib import Path
from typing import Any

from pipeline.contract.bundle import PROVENANCE, Manifest, statement
from pipeline.contract.run import Run
from pipeline.contract.settings.bundled import BUNDLED_SETTINGS
from pipeline.contract.signature import Signature
from pipeline.system.files import digest_mapping, write_json
from pipeline.system.sources import package_sources

_PACKAGES = ("torch", "onnx", "onnxscript", "onnxruntime", "onnxruntime-gpu", "numpy", "safetensors")
_SECTIONS = ("name", "task", "codec", "prepare", "model", "train", "evaluate", "export")


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
