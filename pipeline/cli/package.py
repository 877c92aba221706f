"""The command that makes images: `pipe package`."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from typing import Annotated, Any

import typer

from pipeline.cli.app import Output, OutputOption, app, emit, project_of
from pipeline.cli.road import finish, make_order, split_words
from pipeline.display import Display
from pipeline.lock import locked
from pipeline.project import Project
from pipeline.runner import run_road
from pipeline.spec.config import Config
from pipeline.spec.errors import ConfigError
from pipeline.spec.run import Run


@app.command()
def package(
    context: typer.Context,
    words: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE…]", help="Overrides.")] = None,
    push: Annotated[bool, typer.Option("--push", help="Push what is built; deployments then name its digest.")] = False,
    modelcar: Annotated[bool, typer.Option("--modelcar", help="Also make a data-only image for KServe.")] = False,
    train: Annotated[bool, typer.Option("--train", help="Make the image of the training pods instead.")] = False,
    output: OutputOption = Output.text,
) -> None:
    """Make the container image of the service: walk the road up to there."""
    project = project_of(context)
    names, overrides = split_words(words)
    if names:
        raise ConfigError(f"{names[0]}: `pipe package` takes overrides alone, as in package.builder=podman")
    if train and modelcar:
        raise ConfigError("--modelcar: is made of a bundle, which a training image has none of; leave one out")
    overrides += [f"package.{word}=true" for word, asked in (("push", push), ("modelcar", modelcar)) if asked]
    config, display = project.config(overrides), Display(live=sys.stderr.isatty())
    with locked(project.runs):
        record = _training(project, config, display) if train else _serving(project, config, display)
    shown = {key: value for key, value in record.items() if value and not isinstance(value, dict)}
    emit(output, record, "\n".join(f"{name:12} {value}" for name, value in shown.items()))


def _serving(project: Project, config: Config, display: Display) -> dict[str, Any]:
    order = make_order(["package"], None, None, None)
    run: Run = finish(project, lambda: run_road(project, config, order, display))
    return {"run": run.id, **json.loads((run.output("package") / "image.json").read_text())}


def _training(project: Project, config: Config, display: Display) -> dict[str, Any]:
    from pipeline.training_image import package_training  # other commands do without the locks of images

    with contextlib.redirect_stdout(sys.stderr):  # what the builder says is for people
        return package_training(project, config, os.environ, display.say)
