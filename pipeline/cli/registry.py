"""`pipe registry`: names of bundles and their history, promotion and rollback; and `pipe sign`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from pipeline.cli.app import KubeContext, Output, OutputOption, app, emit, project_of, table
from pipeline.cli.run import cluster_overrides, emit_run, newest_bundle, run_and_report
from pipeline.contract.bundle import Bundle
from pipeline.contract.config import override_config
from pipeline.contract.registry import CHAMPION, PREVIOUS, Entry, Registry, open_store, read_registry
from pipeline.contract.run import Run
from pipeline.contract.signing import new_key, private_key
from pipeline.display import Display
from pipeline.history import Project, find_run, lock_run, lock_runs, lock_service
from pipeline.override import sign_bundle, sign_run
from pipeline.redeploy import redeploy
from pipeline.service.cluster_record import (
    ClusterRecord,
    Version,
    end_failed_restore,
    read_cluster_records,
    run_of_version,
    select_record,
    step_back,
    without_canary,
)
from pipeline.service.process import LiveService, read_live
from pipeline.service.rollout import end_canary as end_local_canary
from pipeline.service.rollout import finish_canary, serve_bundle
from pipeline.service.rollout import promote as promote_name
from pipeline.service.rollout import rollback as roll_back_name
from pipeline.system.errors import ConfigError, StageError

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
    change = registry.last_change(CHAMPION if name == PREVIOUS else name)  # `previous` changes with the champion
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
    """Make a run's bundle the champion, or give it another name; a canary that becomes champion gets all requests."""
    project = project_of(context)
    with lock_service(project.runs):
        if name == CHAMPION:
            live = _live_service(project.runs)
            records = _cluster_records(project.runs, live, cluster_context, namespace)
            canaries = [
                item
                for item in records
                if item.canary and (not run or find_run(project.runs, run).id == item.canary.run)
            ]
            if (record := _select_record(canaries, cluster_context)) and record.canary:
                return _deploy_version(project, record, record.canary, cluster_context, output)
            if live and live.canary and (not run or find_run(project.runs, run).id == live.canary.run):
                return _print_entry(output, name, finish_canary(project.runs, live, _report), "; it gets all requests")
        promoted_run = find_run(project.runs, run) if run else newest_bundle(project)
        entry = promote_name(promoted_run, bundle_of(promoted_run), reason, name, project.config().registry)
        return _print_entry(output, name, entry)


@commands.command()
def rollback(
    context: typer.Context,
    name: Name = CHAMPION,
    reason: Reason = "rolled back",
    cluster_context: KubeContext = None,
    namespace: Namespace = None,
    output: OutputOption = Output.text,
) -> None:
    """End a canary; without one, restore the previous champion and serve it again, or restore another name."""
    project = project_of(context)
    runs = project.runs
    with lock_service(runs):
        if name != CHAMPION:
            return _print_entry(output, name, roll_back_name(runs, project.config().registry, name, reason))
        live = _live_service(runs)
        records = _cluster_records(runs, live, cluster_context, namespace)
        if record := _select_record(records, cluster_context):
            return _roll_back_cluster(project, record, cluster_context, output)
        if live and live.canary:
            return _end_local_canary(runs, live, output)
        entry = roll_back_name(runs, project.config().registry, name, reason)
        return _print_entry(output, name, entry, _serve_again(runs, live, entry))


def _live_service(runs: Path) -> LiveService | None:
    live = read_live(runs)
    return live if live and live.alive else None


def _cluster_records(
    runs: Path, live: LiveService | None, context: str | None, namespace: str | None
) -> list[ClusterRecord]:
    """Return what serves on clusters, at the named place; without a name, a service on this machine comes first."""
    if context is None and namespace is None:
        return [] if live else read_cluster_records(runs)
    records = [record for record in read_cluster_records(runs) if namespace in (None, record.namespace)]
    if context is not None:
        server = _server_of(context)  # the same name may be that of another cluster in another kubeconfig
        records = [record for record in records if record.server == server]
    if not records:
        raise ConfigError("nothing that this project deployed is recorded there; `pipe status` lists all places")
    return records


def _select_record(records: Sequence[ClusterRecord], context: str | None) -> ClusterRecord | None:
    """Return the only record, or None without one; its context must still be that of its cluster."""
    record = select_record(records)
    if record and context is None and (server := _server_of(record.context)) != record.server:
        raise ConfigError(
            f"{record.name} was deployed to {record.place}, but the context {record.context} is that of {server} now; "
            "name the right one with --context, or set KUBECONFIG"
        )
    return record


def _server_of(context: str) -> str:
    from k8s.cluster.api import connect  # slow to load

    return connect(context).server


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


def _deploy_version(
    project: Project, record: ClusterRecord, version: Version, context: str | None, output: Output
) -> None:
    """Give one version all requests again, with the image and the settings that it was deployed with."""
    display = Display(live=sys.stderr.isatty())
    source = run_of_version(project.runs, version)
    overrides = [
        *record.place_overrides(source.config),
        f"deploy.image={version.image}",
        f"registry={json.dumps(project.config().registry)}",
        "rollout.canary_percent=0",
        *cluster_overrides(None, context),
    ]
    config = override_config(source.config, overrides)
    emit_run(output, run_and_report(display, lambda: redeploy(project, source, config, display)))


def _restore_current(project: Project, record: ClusterRecord, context: str | None, output: Output) -> None:
    try:
        _deploy_version(project, record, record.current, context, output)
    except StageError:
        end_failed_restore(project.runs, record)
        raise


def _roll_back_cluster(project: Project, record: ClusterRecord, context: str | None, output: Output) -> None:
    """Restore the recorded version where the cluster has another one, as after an interrupted deployment.

    Where the cluster has the recorded version, restore the one before it, and forget the recorded one, so that another
    rollback goes one version further.
    """
    if record.canary is not None:
        return _end_cluster_canary(project, record, context, output)
    from k8s.cluster.drift import read_live_version  # slow to load

    manifests = Run(project.runs / record.current.run).output("deploy") / "manifests"
    live = read_live_version(context or record.context, record.namespace, manifests)
    if record.unfinished or live.bundle != record.current.bundle:
        bundle = f"bundle {live.bundle[:12]}" if live.bundle else "an unknown bundle"
        deployment = f" of run {record.unfinished}" if record.unfinished else ""
        print(f"{bundle}{deployment}, whose deployment was not verified, is replaced", file=sys.stderr)
        return _restore_current(project, record, context, output)
    if live.canary:
        return _end_cluster_canary(project, record, context, output)
    if record.previous is None:
        raise ConfigError(
            f"{record.name} in namespace {record.namespace} has no previous version; there is nothing to roll back to"
        )
    run_of_version(project.runs, record.previous)  # nothing is recorded if its run is gone
    record = step_back(project.runs, record)
    return _restore_current(project, record, context, output)


def _end_cluster_canary(project: Project, record: ClusterRecord, context: str | None, output: Output) -> None:
    from k8s.deploy import end_canary  # slow to load

    recorded = run_of_version(project.runs, record.current).config
    config = override_config(recorded, [*record.place_overrides(recorded), *cluster_overrides(None, context)])
    end_canary(config, lambda text: print(text, file=sys.stderr))
    without_canary(project.runs, record)
    canary = f"the canary of run {record.canary.run}" if record.canary else "the unrecorded canary"
    text = f"{canary} has ended; bundle {record.current.bundle[:12]} gets all requests"
    facts = {"canary": record.canary.model_dump() if record.canary else None, "current": record.current.model_dump()}
    emit(output, facts, text)


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
