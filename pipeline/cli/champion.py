"""Commands that name the champion by hand, and end a canary: promote, rollback."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from pipeline.champion import promote as make_champion
from pipeline.champion import rollback as go_back
from pipeline.cli.app import Output, OutputOption, app, emit, project_of
from pipeline.cli.registry import bundle_of
from pipeline.cli.road import Context, emit_run, finish, newest_bundle, where
from pipeline.display import Display
from pipeline.history import find_run
from pipeline.lock import locked
from pipeline.placed import Placed, Version, read_placed, run_of, without_canary
from pipeline.project import Project
from pipeline.runner import redeploy
from pipeline.service import Live, read_live
from pipeline.spec.errors import ConfigError
from pipeline.spec.registry import Entry
from pipeline.spec.run import Run


@app.command()
def promote(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="[RUN]", help="A run with a bundle; the newest by default.")] = "",
    cluster_context: Context = None,
    output: OutputOption = Output.text,
) -> None:
    """Make a run's bundle the champion that candidates have to beat; a canary then gets all requests."""
    project = project_of(context)
    with locked(project.runs):
        live = _live(project.runs)
        placed = _placed(project.runs, live)
        if placed and placed.canary and (not name or find_run(project.runs, name).id == placed.canary.run):
            return _put(project, placed, placed.canary, cluster_context, output)
        if live and live.canary and (not name or find_run(project.runs, name).id == live.canary.run):
            from pipeline.rollout import finish_canary  # numpy is slow to load

            return _tell(output, finish_canary(project.runs, live), "; it gets all requests")
        run = find_run(project.runs, name) if name else newest_bundle(project)
        word = project.config().registry
        return _tell(output, make_champion(run, bundle_of(run), "promoted by hand", word=word))


@app.command()
def rollback(context: typer.Context, cluster_context: Context = None, output: OutputOption = Output.text) -> None:
    """End a canary; without one, make the champion before the champion again and serve it: at once where it is still
    loaded, and on a cluster by the image that was recorded."""
    project = project_of(context)
    runs = project.runs
    with locked(runs):
        live = _live(runs)
        if placed := _placed(runs, live):
            return _back(project, placed, cluster_context, output)
        if live and live.canary:
            from pipeline.rollout import end_canary  # numpy is slow to load

            ended = end_canary(runs, live)
            text = f"the canary of run {live.canary.run} has ended; bundle {ended.bundle[:12]} gets all requests"
            return emit(output, {"canary": live.canary.model_dump(), "bundle": ended.bundle, "run": ended.run}, text)
        entry = go_back(runs, project.config().registry)
        return _tell(output, entry, _serve_again(runs, live, entry))


def _live(runs: Path) -> Live | None:
    live = read_live(runs)
    return live if live and live.alive else None


def _placed(runs: Path, live: Live | None) -> Placed | None:
    """What serves on a cluster, unless a service is live here."""
    return read_placed(runs) if live is None else None


def _put(project: Project, placed: Placed, version: Version, context: str | None, output: Output) -> None:
    """Let one version have all requests; its image is the recorded one, not built anew."""
    display = Display(live=sys.stderr.isatty())
    words = [*placed.place, f"deploy.image={version.image}", "rollout.canary=0", *where(None, context)]
    source = run_of(project.runs, version)
    emit_run(output, finish(project, lambda: redeploy(project, source, words, display)))


def _back(project: Project, placed: Placed, context: str | None, output: Output) -> None:
    """To what is recorded where something else is there, as after a `pipe` that was killed; else to what was before."""
    if placed.canary is not None and not placed.canary_in_place:
        return _end_canary(project, placed, context, output)
    if placed.canary is not None:
        return _put(project, placed, placed.current, context, output)
    from k8s.drift import found  # others do without the manifests

    manifests = Run(project.runs / placed.current.run).output("deploy") / "manifests"
    live = found(context or placed.context, placed.namespace, manifests)
    if live.bundle != placed.current.bundle:
        print(f"bundle {live.bundle[:12] or 'of nobody'}, which never proved itself, gives way", file=sys.stderr)
        return _put(project, placed, placed.current, context, output)
    if live.canary:
        return _end_canary(project, placed, context, output)
    if placed.previous is None:
        raise ConfigError(f"nothing served {placed.name} in namespace {placed.namespace} before; there is no way back")
    return _put(project, placed, placed.previous, context, output)


def _end_canary(project: Project, placed: Placed, context: str | None, output: Output) -> None:
    from k8s.deploy import end_canary  # others do without the manifests
    from pipeline.spec.config import override_config

    config = override_config(run_of(project.runs, placed.current).config, [*placed.place, *where(None, context)])
    end_canary(config, lambda text: print(text, file=sys.stderr))
    without_canary(project.runs, placed)
    of_whom = f"of run {placed.canary.run}" if placed.canary else "that was left behind"
    text = f"the canary {of_whom} has ended; bundle {placed.current.bundle[:12]} gets all requests"
    canary = placed.canary.model_dump() if placed.canary else None
    return emit(output, {"canary": canary, "current": placed.current.model_dump()}, text)


def _serve_again(runs: Path, live: Live | None, entry: Entry) -> str:
    """Whether it answers already, in words."""
    if live is None or live.bundle == entry.bundle:
        return ""
    from pipeline.rollout import go_back as switch_back  # numpy is slow to load

    if switch_back(runs, live, entry):
        return "; it was still loaded and gets all requests again"
    return f"; `pipe deploy {entry.run}` serves it"


def _tell(output: Output, entry: Entry, more: str = "") -> None:
    text = f"champion is bundle {entry.bundle[:12]} of run {entry.run}{more}"
    emit(output, entry.model_dump() | {"run": entry.run}, text)
