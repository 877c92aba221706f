"""Objects as files: one YAML each and a kustomization that lists them, byte for byte the same every time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from pipeline.spec.files import write_atomic

_KUSTOMIZATION = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization"}


def write(objects: Iterable[Mapping[str, Any]], directory: Path) -> list[Path]:
    """Every file written, sorted."""
    directory.mkdir(parents=True, exist_ok=True)
    clear(directory)
    texts = {f"{item['kind']}-{item['metadata']['name']}.yaml".lower(): _text(item) for item in objects}
    texts["kustomization.yaml"] = _text({**_KUSTOMIZATION, "resources": sorted(texts)})
    for name, text in texts.items():
        write_atomic(directory / name, text)
    return [directory / name for name in sorted(texts)]


def clear(directory: Path) -> None:
    """Take away what an earlier rendering listed: a file that is in no kustomization any more would only mislead."""
    file = directory / "kustomization.yaml"
    listed = yaml.safe_load(file.read_text())["resources"] if file.is_file() else []
    for name in listed:
        if Path(name).name == name:  # ours are all beside it
            (directory / name).unlink(missing_ok=True)


def write_documents(files: Mapping[str, Iterable[Mapping[str, Any]]], directory: Path) -> list[Path]:
    """What an engine reads as one file: it is submitted, not applied, so that no kustomization lists it."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, documents in sorted(files.items()):
        write_atomic(directory / name, "---\n".join(_text(item) for item in documents))
    return [directory / name for name in sorted(files)]


def _text(value: Mapping[str, Any]) -> str:
    """Keys in the order people read them: apiVersion, kind, metadata, spec."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, default_flow_style=False, width=120)


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002 - the overridden method's signature
        """Labels shared by several objects are written out each time, not as YAML anchors."""
        return True
