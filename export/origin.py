"""What the provenance of a bundle says of this export: its settings, the packages at work, and our own source."""

from __future__ import annotations

import platform
from importlib import metadata
from pathlib import Path
from typing import Any

from pipeline.spec.bundle import Manifest
from pipeline.spec.digest import digest_mapping
from pipeline.spec.files import write_json
from pipeline.spec.limits import SEALED
from pipeline.spec.provenance import PROVENANCE, statement
from pipeline.spec.run import Run
from pipeline.spec.signature import Signature
from pipeline.spec.sources import house_sources

_PACKAGES = ("torch", "onnx", "onnxscript", "onnxruntime", "onnxruntime-gpu", "numpy", "safetensors")
_SECTIONS = ("name", "task", "codec", "prepare", "model", "train", "evaluate", "export")


def write_provenance(bundle: Path, run: Run, signature: Signature) -> None:
    """Beside a manifest that is written: it is one of the subjects."""
    raw = (bundle / "manifest.json").read_bytes()
    config = run.planned.model_dump(mode="json")  # as it was begun, which is what its results are known by
    said: dict[str, Any] = {name: config[name] for name in _SECTIONS}
    said["serve"] = {name: config["serve"][name] for name in SEALED}
    packages = _versions(_PACKAGES) | dict(_split(pin) for pin in signature.requires)
    builder = {"python": platform.python_version(), "source": digest_mapping(house_sources("export"))}
    builder |= _versions(("pipe-road",))
    write_json(bundle / PROVENANCE, statement(Manifest.model_validate_json(raw), raw, said, packages, builder))


def _versions(names: tuple[str, ...]) -> dict[str, str]:
    """Of those that are installed."""
    found = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _split(pin: str) -> tuple[str, str]:
    """What the codec needs, as `name==1.2`, or as it is required."""
    name, _, version = pin.partition("==")
    return name, version
