"""Commands that name the champion by hand, and end a canary: promote, rollback.

`pipe registry`: what the names mean and meant; giving one and taking it back, whatever serves.

`pipe sign`: a signature over a bundle, or a key pair to make some with.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from pipeline.cli.app import Output, OutputOption, app, emit, project_of, table
from pipeline.cli.run import Context, emit_run, finish, newest_bundle, where
from pipeline.contract.errors import ConfigError
from pipeline.contract.registry import CHAMPION, PREVIOUS, Change, Entry, Registry, read_registry
from pipeline.contract.registry_store import shelf_of
from pipeline.contract.run import Run
from pipeline.contract.signing import new_key, private_key
from pipeline.display import Display
from pipeline.history import Project, find_run, locked
from pipeline.runner import redeploy
from pipeline.service.cluster_record import Placed, Version, read_placed, run_of, without_canary
from pipeline.service.process import Live, read_live
from pipeline.service.rollout import promote as give
from pipeline.service.rollout import promote as make_champion
from pipeline.service.rollout import rollback as go_back
from pipeline.service.rollout import rollback as take_back


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
            from pipeline.service.rollout import finish_canary  # numpy is slow to load

            return _print_champion(output, finish_canary(project.runs, live), "; it gets all requests")
        run = find_run(project.runs, name) if name else newest_bundle(project)
        word = project.config().registry
        return _print_champion(output, make_champion(run, bundle_of(run), "promoted by hand", word=word))


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
            from pipeline.service.rollout import end_canary  # numpy is slow to load

            ended = end_canary(runs, live)
            text = f"the canary of run {live.canary.run} has ended; bundle {ended.bundle[:12]} gets all requests"
            return emit(output, {"canary": live.canary.model_dump(), "bundle": ended.bundle, "run": ended.run}, text)
        entry = go_back(runs, project.config().registry)
        return _print_champion(output, entry, _serve_again(runs, live, entry))


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
    from k8s.cluster.drift import found  # others do without the manifests

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
    from pipeline.contract.config import override_config

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
    from pipeline.service.rollout import go_back as switch_back  # numpy is slow to load

    if switch_back(runs, live, entry):
        return "; it was still loaded and gets all requests again"
    return f"; `pipe deploy {entry.run}` serves it"


def _print_champion(output: Output, entry: Entry, more: str = "") -> None:
    text = f"champion is bundle {entry.bundle[:12]} of run {entry.run}{more}"
    emit(output, entry.model_dump() | {"run": entry.run}, text)


commands = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="The model registry: names and their history.")
app.add_typer(commands, name="registry")

Name = Annotated[str, typer.Option("--name", help="Which name; candidates have to beat the champion.")]
Reason = Annotated[str, typer.Option("--reason", help="Why, for the history.")]


@commands.command("list")
def list_names(context: typer.Context, output: OutputOption = Output.text) -> None:
    """What each name means now."""
    project = project_of(context)
    word = project.config().registry
    registry = read_registry(project.runs, word)
    rows = [_meaning(registry, name, entry) for name, entry in sorted(registry.names.items())]
    where = shelf_of(word, project.runs).where
    text = table([{**row, "bundle": row["bundle"][:12]} for row in rows]) if rows else f"{where}: no names yet"
    emit(output, {"registry": where, "names": rows}, text)


@commands.command()
def history(
    context: typer.Context,
    name: Annotated[str, typer.Option("--name", help="Of this name alone.")] = "",
    output: OutputOption = Output.text,
) -> None:
    """Every change there ever was, oldest first."""
    project = project_of(context)
    changes = enumerate(read_registry(project.runs, project.config().registry).history, start=1)
    rows = [_row(number, change) for number, change in changes if name in ("", change.name)]
    emit(output, rows, table([{**row, "bundle": row["bundle"][:12]} for row in rows]))


@commands.command("promote")
def registry_promote(
    context: typer.Context,
    run: Annotated[str, typer.Argument(metavar="[RUN]", help="A run with a bundle; the newest by default.")] = "",
    name: Name = CHAMPION,
    reason: Reason = "promoted by hand",
    output: OutputOption = Output.text,
) -> None:
    """Give a name to a run's bundle. What serves stays as it is: `pipe promote` and `pipe deploy` change that."""
    project = project_of(context)
    found = find_run(project.runs, run) if run else newest_bundle(project)
    _print_entry(output, name, give(found, bundle_of(found), reason, name, project.config().registry))


@commands.command("rollback")
def registry_rollback(
    context: typer.Context, name: Name = CHAMPION, reason: Reason = "rolled back", output: OutputOption = Output.text
) -> None:
    """Let a name mean what it meant before. What serves stays as it is: `pipe rollback` changes that, too."""
    project = project_of(context)
    _print_entry(output, name, take_back(project.runs, project.config().registry, name, reason))


def bundle_of(run: Run) -> Any:
    if not (run.bundle_path / "manifest.json").is_file():
        raise ConfigError(f"run {run.id} has no bundle; `pipe run --resume {run.id}` goes on to one")
    return run.bundle()


def _meaning(registry: Registry, name: str, entry: Entry) -> dict[str, Any]:
    """Who is `previous` became so with the champion's last change."""
    change = registry.last(CHAMPION if name == PREVIOUS else name)
    assert change is not None
    return {
        "name": name, "bundle": entry.bundle, "run": entry.run, "since": change.at, "by": change.by,
        "reason": change.reason,
    }  # fmt: skip


def _row(number: int, change: Change) -> dict[str, Any]:
    return {
        "change": number, "at": change.at, "name": change.name, "bundle": change.entry.bundle,
        "run": change.entry.run, "by": change.by, "reason": change.reason,
    }  # fmt: skip


def _print_entry(output: Output, name: str, entry: Entry) -> None:
    text = f"{name} is bundle {entry.bundle[:12]} of run {entry.run}"
    emit(output, {"name": name, **entry.model_dump(), "run": entry.run}, text)


PASSPHRASE = "PIPE_KEY_PASSPHRASE"  # noqa: S105 - the name of a variable


@app.command()
def sign(
    context: typer.Context,
    target: Annotated[str, typer.Argument(metavar="[RUN|BUNDLE]", help="Run or bundle; the newest by default.")] = "",
    key: Annotated[
        Path | None, typer.Option("--key", metavar="FILE", help="Private ed25519 key, in PEM or as OpenSSH writes it.")
    ] = None,
    new: Annotated[
        Path | None, typer.Option("--new-key", metavar="FILE", help="Make a key: FILE to keep, FILE.pub to give away.")
    ] = None,
    output: OutputOption = Output.text,
) -> None:
    """Sign a bundle, so that a service can refuse all others; or make a key."""
    if (key is None) == (new is None):
        raise ConfigError("give --key FILE to sign with, or --new-key FILE to make one")
    if new is not None:
        if target:
            raise ConfigError("--new-key makes a key and signs nothing; give --key FILE to sign")
        text = f"{new} signs, and is nobody's but yours; {new}.pub is for those who verify"
        return emit(output, {"key": str(new), "public": f"{new}.pub", "keyid": new_key(new)}, text)
    assert key is not None
    from pipeline.override import (
        sign_bundle,
        sign_run,  # numpy is slow to load
    )

    private = private_key(key, os.environ.get(PASSPHRASE, ""))
    if target and (Path(target) / "manifest.json").is_file():
        bundle, keyid = sign_bundle(Path(target), private)
    else:
        project = project_of(context)
        with locked(project.runs):
            bundle, keyid = sign_run(find_run(project.runs, target) if target else newest_bundle(project), private)
    found = {"path": str(bundle.path), "bundle": bundle.digest, "keyid": keyid}
    return emit(output, found, f"bundle {bundle.digest[:12]} is signed by {keyid}")
