"""Writing the training manifests without running anything."""

from __future__ import annotations

from pathlib import Path

from k8s.render import write
from k8s.training import objects
from pipeline.project import Project
from pipeline.spec.config import Config
from pipeline.spec.errors import ConfigError


def render_training(project: Project, config: Config, directory: str) -> list[Path]:
    """The Job that would train this project on a cluster."""
    if not config.train.image:
        raise ConfigError(
            "train.image is empty; name the image the training pods run, as in train.image=registry/name:1"
        )
    target = project.runs / "manifests" / "train" if directory == "default" else Path(directory)
    target.mkdir(parents=True, exist_ok=True)
    return list(write(objects(config, config.train.image, "runs/train"), target))
