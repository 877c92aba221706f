"""The command that writes what other engines run."""

from __future__ import annotations

from typing import Annotated

import typer

from pipeline.cli.app import Output, OutputOption, app, project_of
from pipeline.cli.road import emit_paths, split_words
from pipeline.spec.errors import ConfigError

Words = Annotated[list[str], typer.Argument(metavar="workflow [DIR] [KEY=VALUE…]", help="What, where, and overrides.")]


@app.command()
def render(
    context: typer.Context,
    words: Words,
    engine: Annotated[str, typer.Option("--engine", metavar="argo|kfp", help="Argo or Kubeflow Pipelines.")] = "argo",
    output: OutputOption = Output.text,
) -> None:
    """Write the whole road as a workflow: the same steps, commands and image as `pipe run`."""
    names, overrides = split_words(words)
    if names[:1] != ["workflow"] or len(names) > 2:
        raise ConfigError(f"pipe render {' '.join(names)}: write it as `pipe render workflow [DIR] [KEY=VALUE…]`")
    from pipeline.render import lacking, render_workflow  # other commands do without the manifests

    project = project_of(context)
    config, directory = project.config(overrides), names[1] if len(names) == 2 else "default"
    emit_paths(output, render_workflow(project, config, engine, directory))
    if found := lacking(config):
        typer.echo(f"note: {found}", err=True)
