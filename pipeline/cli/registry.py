"""`pipe registry`: names of bundles and their history, promotion and rollback; and `pipe sign`."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from pipeline.cli.app import KubeContext, Output, OutputOption, app, emit, project_of, table
from pipeline.cli.run import newest_bundle
from pipeline.contract.bundle import Bundle
from pipeline.contract.config import Config
from pipeline.contract.registry import CHAMPION, PREVIOUS, Entry, Registry, open_store, read_registry
from pipeline.contract.run import Run
from pipeline.contract.settings.access import Access
from pipeline.contract.signing import new_key, private_key
from pipeline.history import Project, find_run, lock_run, lock_runs, lock_service
from pipeline.override import sign_bundle, sign_run
from pipeline.service.places import choose_place, crown, find_bundle
from pipeline.service.process import LiveService, read_live
from pipeline.service.rollout import end_canary as end_local_canary
from pipeline.service.rollout import finish_canary, serve_bundle
from pipeline.service.rollout import promote as promote_name
from pipeline.service.rollout import rollback as roll_back_name
from pipeline.system.errors import ConfigError

commands = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Show the registry's names, promote a bundle, or roll back."
)
app.add_typer(commands, name="registry")

Name = Annotated[str, typer.Option("--name", help="Name in the registry; new candidates must beat the champion.")]
Namespace = Annotated[
    str | None, typer.Option("--namespace", help="Namespace on a cluster, where there are several deployments.")
]
Reason = Annotated[str, typer.Option("--reason", help="Reason to record in the history.")]


@commands.command("list")
def list_names(context: typer.Context, output: OutputOption = Output.text) -> None:
    """List the names and the bundles they point to."""
    project = project_of(context)
    location = project.config().registry
    registry = read_registry(project.runs, location)
    rows = [_name_row(registry, name, entry) for name, entry in sorted(registry.names.items())]
    store_location = open_store(location, project.runs).where
    text = table([{**row, "bundle": row["bundle"][:12]} for row in rows]) if rows else f"{store_location}: no names yet"
    emit(output, {"registry": store_location, "names": rows}, text)


def _name_row(registry: Registry, name: str, entry: Entry) -> dict[str, Any]:
    is_previous = name.partition("@")[0] == PREVIOUS  # it changes with the champion
    change = registry.last_change(name.replace(PREVIOUS, CHAMPION, 1) if is_previous else name)
    assert change is not None
    return {
        "name": name, "bundle": entry.bundle, "run": entry.run, "since": change.at, "by": change.by,
        "reason": change.reason,
    }  # fmt: skip


@commands.command()
def history(
    context: typer.Context,
    name: Annotated[str, typer.Option("--name", help="Only changes of this name.")] = "",
    output: OutputOption = Output.text,
) -> None:
    """List all changes, oldest first."""
    project = project_of(context)
    changes = enumerate(read_registry(project.runs, project.config().registry).history, start=1)
    rows: list[dict[str, Any]] = [
        {
            "change": number, "at": change.at, "name": change.name, "bundle": change.entry.bundle,
            "run": change.entry.run, "by": change.by, "reason": change.reason,
        }
        for number, change in changes if name in ("", change.name)
    ]  # fmt: skip
    emit(output, rows, table([{**row, "bundle": row["bundle"][:12]} for row in rows]))


@commands.command()
def promote(
    context: typer.Context,
    run: Annotated[str, typer.Argument(metavar="[RUN]", help="A run with a bundle; the newest by default.")] = "",
    name: Name = CHAMPION,
    reason: Reason = "promoted by hand",
    cluster_context: KubeContext = None,
    namespace: Namespace = None,
    output: OutputOption = Output.text,
) -> None:
    """Give a canary all requests and make it the champion; without a cluster, make any bundle champion or name it.

    Each place on a cluster has its own champion: the version that serves there.
    """
    project = project_of(context)
    if name == CHAMPION and (place := _choose_place(project, cluster_context, namespace)):
        return _promote_on_cluster(project, place, run, reason, output)
    with lock_service(project.runs):
        live = _live_service(project.runs) if name == CHAMPION else None
        if live and live.canary and (not run or find_run(project.runs, run).id == live.canary.run):
            return _print_entry(output, name, finish_canary(project.runs, live, _report), "; it gets all requests")
        promoted_run = find_run(project.runs, run) if run else newest_bundle(project)
        entry = promote_name(promoted_run, bundle_of(promoted_run), reason, name, project.config().registry)
        others = live is not None and live.bundle != entry.bundle
        more = f"; the live service goes on with bundle {live.bundle[:12]}" if live and others else ""
        return _print_entry(output, name, entry, more)


@commands.command()
def rollback(
    context: typer.Context,
    name: Name = CHAMPION,
    number: Annotated[
        int | None, typer.Option("--to", metavar="VERSION", help="Number of the version on the cluster to restore.")
    ] = None,
    reason: Reason = "rolled back",
    cluster_context: KubeContext = None,
    namespace: Namespace = None,
    output: OutputOption = Output.text,
) -> None:
    """End a canary; without one, restore the previous champion and serve it again, or restore another name."""
    project = project_of(context)
    runs = project.runs
    if name == CHAMPION and (place := _choose_place(project, cluster_context, namespace)):
        return _roll_back_on_cluster(project, place, number, reason, output)
    if number is not None:
        raise ConfigError("--to: names a version on a cluster, and nothing is deployed to one; leave it out")
    with lock_service(runs):
        if name != CHAMPION:
            return _print_entry(output, name, roll_back_name(runs, project.config().registry, name, reason))
        live = _live_service(runs)
        if live and live.canary:
            return _end_local_canary(runs, live, output)
        entry = roll_back_name(runs, project.config().registry, name, reason)
        return _print_entry(output, name, entry, _serve_again(runs, live, entry))


def _live_service(runs: Path) -> LiveService | None:
    live = read_live(runs)
    return live if live and live.alive else None


def _choose_place(project: Project, context: str | None, namespace: str | None) -> Config | None:
    """Return the settings of the place on a cluster; without a name, a service on this machine comes first."""
    if context is None and namespace is None and _live_service(project.runs):
        return None
    return choose_place(project, context, namespace)


def _promote_on_cluster(project: Project, place: Config, run: str, reason: str, output: Output) -> None:
    from k8s.deploy import promote as promote_canary  # slow to load

    access = Access.from_settings(place.serve, project.root)
    with contextlib.suppress(ConfigError):  # the run may be on another machine
        run = find_run(project.runs, run).id if run else ""
    version = promote_canary(place, access, _report, functools.partial(find_bundle, project), run)
    text = f"{version.title} gets all requests in namespace {place.deploy.namespace}"
    emit(output, version.facts(), f"{text}; {crown(project, place, version, reason)}")


def _roll_back_on_cluster(project: Project, place: Config, number: int | None, reason: str, output: Output) -> None:
    from k8s.deploy import roll_back  # slow to load

    access = Access.from_settings(place.serve, project.root)
    version, canary = roll_back(place, access, _report, functools.partial(find_bundle, project), number)
    facts = {"current": version and version.facts(), "canary": canary and canary.facts()}
    serving = version.title if version else "what was applied by hand"
    text = f"{serving} gets all requests in namespace {place.deploy.namespace}"
    if canary is not None:
        text = f"the canary of {canary.title} has ended; {text}"
    elif version is not None:
        text += f"; {crown(project, place, version, reason, rollback=True)}"
    emit(output, facts, text)


def _end_local_canary(runs: Path, live: LiveService, output: Output) -> None:
    assert live.canary is not None
    restored = end_local_canary(runs, live, _report)
    text = f"the canary of run {live.canary.run} has ended; bundle {restored.bundle[:12]} gets all requests"
    emit(output, {"canary": live.canary.model_dump(), "bundle": restored.bundle, "run": restored.run}, text)


def _serve_again(runs: Path, live: LiveService | None, entry: Entry) -> str:
    """Serve the bundle of an entry in place of the live one; return what happened."""
    if live is None or live.bundle == entry.bundle:
        return ""
    if not (Run(runs / entry.run).path / "run.json").is_file():
        return f"; its run {entry.run} is not here, so the service goes on with bundle {live.bundle[:12]}"
    serve_bundle(runs, live, entry.run, entry.bundle, _report)
    return "; it gets all requests again"


def _report(text: str) -> None:
    print(text, file=sys.stderr)


def bundle_of(run: Run) -> Bundle:
    if not (run.bundle_path / "manifest.json").is_file():
        raise ConfigError(f"run {run.id} has no bundle; `pipe run --resume {run.id}` continues it")
    return run.bundle()


def _print_entry(output: Output, name: str, entry: Entry, more: str = "") -> None:
    text = f"{name} is bundle {entry.bundle[:12]} of run {entry.run}{more}"
    emit(output, {"name": name, **entry.model_dump(), "run": entry.run}, text)


PASSPHRASE = "PIPE_KEY_PASSPHRASE"  # noqa: S105 - the name of a variable


@app.command()
def sign(
    context: typer.Context,
    target: Annotated[
        str, typer.Argument(metavar="[RUN|BUNDLE]", help="Run or bundle; the newest bundle by default.")
    ] = "",
    key: Annotated[
        Path | None, typer.Option("--key", metavar="FILE", help="Private ed25519 key, in PEM or OpenSSH format.")
    ] = None,
    new_key_path: Annotated[
        Path | None, typer.Option("--new-key", metavar="FILE", help="Make a key pair: FILE, private, and FILE.pub.")
    ] = None,
    output: OutputOption = Output.text,
) -> None:
    """Sign a bundle, or make a key pair."""
    if (key is None) == (new_key_path is None):
        raise ConfigError("give --key FILE to sign with, or --new-key FILE to make one")
    if new_key_path is not None:
        if target:
            raise ConfigError("--new-key makes a key and signs nothing; give --key FILE to sign")
        text = f"{new_key_path} is the private key: keep it secret; {new_key_path}.pub is for those who verify"
        return emit(
            output, {"key": str(new_key_path), "public": f"{new_key_path}.pub", "keyid": new_key(new_key_path)}, text
        )
    assert key is not None
    signing_key = private_key(key, os.environ.get(PASSPHRASE, ""))
    if target and (Path(target) / "manifest.json").is_file():
        bundle, keyid = sign_bundle(Path(target), signing_key)
    else:
        project = project_of(context)
        with lock_runs(project.runs, shared=True):
            signed_run = find_run(project.runs, target) if target else newest_bundle(project)
            with lock_run(signed_run):
                bundle, keyid = sign_run(signed_run, signing_key)
    facts = {"path": str(bundle.path), "bundle": bundle.digest, "keyid": keyid}
    return emit(output, facts, f"bundle {bundle.digest[:12]} is signed by {keyid}")
