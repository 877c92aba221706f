"""Gathering the parts of a step's key: the one place that reads sources, versions and the registry for it."""

from __future__ import annotations

import platform
from collections.abc import Mapping

from pipeline.checks.champion import NONE, PART, rival
from pipeline.history import data_files, installed_versions
from pipeline.plan import config_parts, input_parts
from pipeline.pretrained import pretrained_parts
from pipeline.project import Project
from pipeline.spec.config import Config
from pipeline.spec.digest import digest_file
from pipeline.spec.registry import read_registry
from pipeline.spec.signing import SIGNATURE
from pipeline.spec.sources import HOUSE, house_sources, outside_imports, project_sources
from pipeline.steps import KINDS

_DISTRIBUTIONS = {"sklearn": "scikit-learn", "PIL": "pillow"}  # whose modules have other names
_IMAGE_FILES = ("k8s/images/serve.Dockerfile", "k8s/images/slim.py")


def parts_of(step: str, config: Config, project: Project, outputs: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """Named parts; `outputs` holds what is known of earlier steps' files."""
    kind = KINDS[step]
    parts = config_parts(step, config) | input_parts(step, outputs)
    parts |= _prefixed(
        "house", {k: v for module in (kind.module, *kind.also) for k, v in house_sources(module).items()}
    )
    parts |= _prefixed("version", installed_versions(kind.packages))
    parts["version:python"] = ".".join(platform.python_version_tuple()[:2])
    if kind.user_code:
        parts |= _prefixed("source", project_sources(project.root, config.task, config.codec))
        parts |= _prefixed("version", installed_versions(_imported(project, config)))
    if step == "prepare":
        parts |= _prefixed("pretrained", pretrained_parts(config, project.root, project.runs))
        parts |= _prefixed("file", data_files(project.root, config.prepare.files))
        found = rival(read_registry(project.runs, config.registry), project.runs, parts)
        parts[PART] = found.bundle if found else NONE
    if step == "package":
        parts |= _prefixed("house", {name: digest_file(HOUSE / name) for name in _IMAGE_FILES})
        if config.package.wheels:
            parts |= _prefixed("file", data_files(project.root, (f"{config.package.wheels}/*.whl",), "package.wheels"))
    if step == "package" and (signed := outputs.get("export", {}).get(f"bundle/{SIGNATURE}")):
        parts[f"input:export/bundle/{SIGNATURE}"] = signed  # the image holds it, where there is one
    if step == "evaluate":
        champion = read_registry(project.runs, config.registry).champion_for(
            outputs.get("train", {}).get("model.safetensors")
        )
        parts["baseline:champion"] = champion.bundle if champion else "the task's own"
    return parts


def _imported(project: Project, config: Config) -> tuple[str, ...]:
    """Distributions the task and codec import, as far as their name tells: reading all file lists takes too long."""
    found = outside_imports(project.root, config.task, config.codec)
    return tuple(sorted(_DISTRIBUTIONS.get(module, module) for module in found))


def _prefixed(prefix: str, parts: Mapping[str, str]) -> dict[str, str]:
    return {f"{prefix}:{name}": value for name, value in parts.items()}
