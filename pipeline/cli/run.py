"""Commands that run steps: plan, run, join, package, deploy."""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from pipeline.cli.app import (
    KubeContext,
    Output,
    OutputOption,
    Overrides,
    RunName,
    app,
    complete_words,
    emit,
    pairs,
    project_of,
    split_overrides,
    table,
)
from pipeline.continuation import continued_config, find_starting_point
from pipeline.contract.bundle import read_override
from pipeline.contract.config import Config, override_config
from pipeline.contract.run import STEPS, Run
from pipeline.contract.settings.access import Access
from pipeline.display import Display
from pipeline.history import Project, find_run, load_history, lock_place, lock_run, lock_runs
from pipeline.plan import CHECK, Decision, select_steps, with_upstream
from pipeline.plan_memory import describe_memory, plan_memory
from pipeline.redeploy import check_deployment_overrides, deployment_config, find_deployable, redeploy
from pipeline.resume import accept_outputs, latest_unfinished
from pipeline.run import check_pipeline, resume_run, run_pipeline, start_fork_server
from pipeline.service.places import crown, find_bundle
from pipeline.service.process import read_live
from pipeline.system.errors import ConfigError, Interrupted, ResourceError, disk_full
from pipeline.system.files import read_object
from pipeline.work import LONG_TRAINING_SECONDS, OnChanges, RunRequest, Work, last_training_seconds


class Engine(StrEnum):
    argo = "argo"
    kfp = "kfp"


Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[STEP…] [KEY=VALUE…]", help="`all` or steps, and settings to override.", autocompletion=complete_words
    ),
]
From = Annotated[str | None, typer.Option("--from", help="First step; the ones before it must be up to date.")]
Until = Annotated[str | None, typer.Option("--until", help="Last step.")]
Force = Annotated[list[str] | None, typer.Option("--force", help="Run this step, or `all`, although nothing changed.")]
Resume = Annotated[
    str | None,
    typer.Option("--resume", metavar="[RUN]", help="Continue a stopped run; overrides may change where it trains."),
]
Continued = Annotated[
    str | None,
    typer.Option(
        "--continue",
        metavar="[RUN[@STEP]]",
        help="Start a new run that trains on from the checkpoint of an earlier one, with other settings.",
    ),
]
Since = Annotated[
    str | None,
    typer.Option(
        "--since", metavar="RUN", help="Start a new run with the settings of an earlier one, and read the data anew."
    ),
]
Executor = Annotated[str | None, typer.Option("--executor", metavar="[local|kubernetes]", help="Where steps run.")]
Render = Annotated[
    str | None, typer.Option("--render", metavar="[DIR]", help="Only write Kubernetes manifests, to this folder.")
]


@app.command()
def plan(
    context: typer.Context,
    words: Words = None,
    start: From = None,
    until: Until = None,
    force: Force = None,
    workflow: Annotated[
        Engine | None,
        typer.Option("--workflow", help="Write all steps as a workflow for Argo or Kubeflow Pipelines instead."),
    ] = None,
    render: Annotated[
        str, typer.Option("--render", metavar="[DIR]", help="With --workflow: folder to write it to.")
    ] = "",
    check: Annotated[
        bool, typer.Option("--check", help="Also send an untrained model through everything, and write nothing.")
    ] = False,
    exit_code: Annotated[bool, typer.Option("--exit-code", help="Exit with 4 when something would run.")] = False,
    output: OutputOption = Output.text,
) -> None:
    """Print what would run, and why."""
    project = project_of(context)
    names, overrides = split_overrides(words)
    if workflow is not None:
        if names not in ([], ["all"]):
            raise ConfigError(f"--workflow: writes all steps; remove {names[0]}")
        return _write_workflow(project, project.config(overrides), workflow, render or "default", output)
    if render:
        raise ConfigError("--render: needs --workflow argo or --workflow kfp; `pipe deploy --render` writes manifests")
    if names == ["deploy"] and context.info_name == "plan":  # not `pipe run deploy --dry-run`
        check_deployment_overrides(overrides)
    request = make_request(names, start, until, force)
    config = project.config(overrides)
    steps = Work(project, config, request, load_history(project.runs)).preview()
    # Two processes that import the same for seconds.
    server = context.with_resource(start_fork_server(project.root, config, 0)) if check else {}
    memory = _plan_memory(project, config, steps, server)
    values = [asdict(step) | ({"memory": memory} if memory and step.name == "train" else {}) for step in steps]
    rows = [{"step": step.name, "action": step.action, "reason": step.reason} for step in steps]
    texts = [table(rows), *([describe_memory(memory)] if memory else [])]
    changes: list[dict[str, Any]] = []
    if "deploy" in names and steps[-1].name == "deploy":
        if waiting := [step.name for step in steps if step.action == "run" and step.name != "deploy"]:
            note = f"note: what a deployment would change is known once {waiting[-1]} is complete"
            print(f"{note}; `pipe deploy --dry-run` compares the newest bundle", file=sys.stderr)
        else:
            source = find_run(project.runs, next(step.source for step in steps if step.name == "package"))
            changes, text = _preview_deployment(project, source, config)
            values[-1]["changes"] = changes
            texts.append(text)
    emit(output, values, "\n".join(texts))
    if check:
        check_pipeline(project, config, server)
    if exit_code and (changes or any(step.action == "run" and step.name != "deploy" for step in steps)):
        raise typer.Exit(4)
    return None


def _plan_memory(
    project: Project, config: Config, steps: Sequence[Decision], server: Mapping[str, str]
) -> dict[str, Any]:
    """Estimate the memory of training if it would run; empty where that is not possible."""
    if not config.trains or not any(step.name == "train" and step.action == "run" for step in steps):
        return {}
    memory = plan_memory(project, config, steps, server)
    if reason := memory.get("reason"):
        print(f"note: the memory of training cannot be estimated: {reason}", file=sys.stderr)
        return {}
    return memory


def _write_workflow(project: Project, config: Config, engine: Engine, directory: str, output: Output) -> None:
    from pipeline.executors.cluster import missing_image, render_workflow  # the manifests are slow to load

    _emit_paths(output, render_workflow(project, config, engine.value, directory))
    if note := missing_image(config):
        print(f"note: {note}", file=sys.stderr)


@app.command()
def run(
    context: typer.Context,
    words: Words = None,
    start: From = None,
    until: Until = None,
    force: Force = None,
    resume: Resume = None,
    continued: Continued = None,
    since: Since = None,
    accept_changes: Annotated[
        bool, typer.Option("--accept-changes", help="With --resume: go on although code, data or settings changed.")
    ] = False,
    restart: Annotated[
        bool, typer.Option("--restart", help="With --resume: if they changed, train from the beginning.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask, as before a long training.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="The same as `pipe plan`.")] = False,
    render: Render = None,
    executor: Executor = None,
    cluster_context: KubeContext = None,
    output: OutputOption = Output.text,
) -> None:
    """Run the pipeline, or selected steps and their prerequisites."""
    if dry_run:
        return plan(context, words, start, until, force, output=output)
    on_changes = _on_changes(accept_changes, restart, resume)
    project = project_of(context)
    names, overrides = split_overrides(words)
    overrides += cluster_overrides(executor, cluster_context)
    if render is not None:
        if names == ["train"]:
            from pipeline.executors.cluster import render_training  # the manifests are slow to load

            return _emit_paths(output, render_training(project, project.config(overrides), render))
        overrides += _render_overrides(project.config(overrides))
    earlier = {"--resume": resume, "--continue": continued, "--since": since}
    if len(given := [name for name, value in earlier.items() if value is not None]) > 1:
        raise ConfigError(f"{' and '.join(given)}: a run follows one other in one way; leave one out")
    display = Display(live=sys.stderr.isatty())
    with lock_runs(_runs_folder(project, resume), shared=True):
        if resume is not None:
            finished_run = _resume(project, resume, names, overrides, on_changes, yes, display)
        elif continued is not None:
            finished_run = _continue(project, continued, make_request(names, start, until, force), overrides, display)
        elif since is not None:
            finished_run = _repeat(project, since, make_request(names, start, until, force), overrides, display)
        else:
            request = make_request(names, start, until, force)
            finished_run = _begin(project, overrides, request, yes, display)
    _copy_manifests(finished_run, render)
    emit_run(output, finished_run)
    return None


def make_request(names: list[str], start: str | None, until: str | None, force: list[str] | None) -> RunRequest:
    selected = with_upstream(select_steps(names, start, until))
    forced_steps = frozenset(STEPS if "all" in (force or []) else force or [])
    if unknown := sorted(forced_steps - set(STEPS)):
        raise ConfigError(f"--force {unknown[0]}: no such step; there are {', '.join(STEPS)}, and all")
    skipped_steps = frozenset(STEPS[: STEPS.index(start)]) - {CHECK} if start else frozenset()
    return RunRequest(selected, forced_steps, skipped_steps & set(selected))


def _runs_folder(project: Project, resume: str | None) -> Path:
    """Return the folder of runs to lock: a run that is named by its path may be in another one."""
    named = Path(resume) if resume else project.runs
    return named.resolve().parent if (named / "run.json").is_file() else project.runs


def _on_changes(accept_changes: bool, restart: bool, resume: str | None) -> OnChanges:
    if accept_changes and restart:
        raise ConfigError("--restart: contradicts --accept-changes; leave one out")
    if (accept_changes or restart) and resume is None:
        raise ConfigError(f"--{'restart' if restart else 'accept-changes'}: is for --resume")
    return "accept" if accept_changes else "restart" if restart else "stop"


def run_project(project: Project, names: list[str]) -> Run:
    display = Display(live=sys.stderr.isatty())
    with lock_runs(project.runs, shared=True):
        return _begin(project, [], make_request(names, None, None, None), True, display)


def _begin(project: Project, overrides: list[str], request: RunRequest, yes: bool, display: Display) -> Run:
    config = project.config(overrides)
    if not yes:
        _ask_before_training(project, config, request)
    return run_and_report(display, lambda: run_pipeline(project, config, request, display))


def _ask_before_training(project: Project, config: Config, request: RunRequest) -> None:
    """Ask on a terminal before a model that took long to train is replaced; elsewhere the plan names the duration."""
    work = Work(project, config, request, load_history(project.runs))
    if last_training_seconds(work.history) < LONG_TRAINING_SECONDS:
        return
    steps = {step.name: step for step in work.preview()}
    training = steps.get("train")
    if training is None or training.action == "reuse" or training.reason == "forced":
        return
    display = Display(live=False)
    display.report(f"train: {training.reason}")
    if not display.ask("Train again? `pipe accept` keeps the trained model instead. [Y/n] "):
        raise ConfigError("nothing was run; `pipe accept` marks the trained model as current")


def _resume(
    project: Project,
    name: str,
    names: list[str],
    overrides: list[str],
    on_changes: OnChanges,
    yes: bool,
    display: Display,
) -> Run:
    selected_steps = with_upstream(select_steps(names, None, None)) if names else ()
    stopped_run = latest_unfinished(project) if name == "latest" else find_run(project.runs, name)
    request = RunRequest(selected_steps or stopped_run.read().wanted, on_changes=on_changes, sure=yes)
    with lock_run(stopped_run):
        display.report(f"resuming run {stopped_run.id}")
        return run_and_report(display, lambda: resume_run(project, stopped_run, request, display, overrides))


def _continue(project: Project, name: str, request: RunRequest, overrides: list[str], display: Display) -> Run:
    start = find_starting_point(project, name)
    config, request = continued_config(start, overrides), replace(request, starting_point=start)
    display.report(f"continuing the training of run {start.source.id} from its checkpoint of step {start.step}")
    return run_and_report(display, lambda: run_pipeline(project, config, request, display))


def _repeat(project: Project, name: str, request: RunRequest, overrides: list[str], display: Display) -> Run:
    """Run with the settings of an earlier run; `prepare` reads the data, though neither code nor files changed."""
    source = find_run(project.runs, name)
    config, request = override_config(source.config, overrides), replace(request, force=request.force | {"prepare"})
    display.report(f"reading the data anew, with the settings of run {source.id}")
    return run_and_report(display, lambda: run_pipeline(project, config, request, display))


def run_and_report(display: Display, run_steps: Callable[[], Run]) -> Run:
    """Run the steps and write the report, however they end; after Ctrl-C or on a full disk, print how to continue."""
    try:
        finished_run = run_steps()
        from pipeline.report.page import write_report  # slow to load

        write_report(finished_run, finished_run.path / "report.html")
    except BaseException as error:
        if display.run is not None and not (display.run.path / "run.json").exists():
            raise ResourceError(
                f"run {display.run.id}: its folder {display.run.path} was removed, or cannot be reached, while the run "
                "was working; nothing of it can be continued"
            ) from error
        if display.run is not None:
            _report_failure(display.run)
        if isinstance(error, KeyboardInterrupt):
            command = f"pipe run --resume {display.run.id}" if display.run else "pipe run all"
            raise Interrupted(f"interrupted; nothing is lost, `{command}` continues") from None
        if isinstance(error, OSError) and error.errno == errno.ENOSPC and display.run is not None:
            raise disk_full(display.run.path, f"`pipe run --resume {display.run.id}`") from error
        raise
    return finished_run


def _report_failure(run: Run) -> None:
    """Write the report of a failed run; a bug in the report must not hide why the run failed."""
    from pipeline.report.page import write_report

    try:
        write_report(run, run.path / "report.html")
    except Exception as problem:
        print(f"warning: no report: {type(problem).__name__}: {problem}", file=sys.stderr)


@app.command()
def accept(
    context: typer.Context,
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[STEP…] [KEY=VALUE…]", help="Steps; all by default.")
    ] = None,
    output: OutputOption = Output.text,
) -> None:
    """Mark outputs as current after a change that cannot matter."""
    project = project_of(context)
    names, overrides = split_overrides(words)
    with lock_runs(project.runs):
        work = Work(
            project, project.config(overrides), make_request(names, None, None, None), load_history(project.runs)
        )
        accepted = accept_outputs(work, () if names in ([], ["all"]) else names)
    rows = [{"step": step, "run": run.id, "accepted": changes} for step, run, changes in accepted]
    emit(output, rows, table(rows) if rows else "nothing to accept: every step is current")


@app.command()
def join(context: typer.Context, run: RunName = "latest") -> None:
    """Train together with the machine that runs `pipe run`."""
    from pipeline.training.node import run_node  # slow to load

    project = project_of(context)
    joined_run = find_run(project.runs, run)
    check_joinable(joined_run)
    try:
        status = run_node(joined_run, project.root, joined=True, train=joined_run.config.train)
    except KeyboardInterrupt:
        raise Interrupted(f"this machine has left training; `pipe join {joined_run.id}` joins again") from None
    sys.exit(status)


def check_joinable(run: Run) -> None:
    train, record = run.config.train, run.read().steps.get("train")
    if train.launcher != "torchrun" or train.most_nodes == 1:
        raise ConfigError(
            f"run {run.id} has train.nodes={train.nodes} and train.launcher={train.launcher}; machines can join where "
            "nodes is above 1, as in train.nodes=2:4, and the launcher is torchrun"
        )
    if record is not None and record.complete:
        raise ConfigError(f"run {run.id} has finished training; there is nothing to join")


@app.command()
def package(
    context: typer.Context,
    words: Overrides = None,
    push: Annotated[bool, typer.Option("--push", help="Push the image; deployments then use its digest.")] = False,
    modelcar: Annotated[bool, typer.Option("--modelcar", help="Also make a data-only image for KServe.")] = False,
    train: Annotated[bool, typer.Option("--train", help="Make the image of the training pods instead.")] = False,
    output: OutputOption = Output.text,
) -> None:
    """Make the container image of the service, or of training pods."""
    project = project_of(context)
    names, overrides = split_overrides(words)
    if names:
        raise ConfigError(f"{names[0]}: `pipe package` takes only overrides, as in package.builder=podman")
    if train and modelcar:
        raise ConfigError("--modelcar: is made from a bundle, which a training image does not have; leave one out")
    overrides += ["package.push=true"] if push else []
    if modelcar and not project.config(overrides).package.modelcar:
        overrides.append("package.modelcar=scratch")
    config, display = project.config(overrides), Display(live=sys.stderr.isatty())
    with lock_runs(project.runs, shared=True):
        record = _package_training(project, config, display) if train else _package_service(project, config, display)
    emit(output, record, pairs({key: value for key, value in record.items() if value}))


def _package_service(project: Project, config: Config, display: Display) -> dict[str, Any]:
    request = make_request(["package"], None, None, None)
    finished_run = run_and_report(display, lambda: run_pipeline(project, config, request, display))
    return {"run": finished_run.id, **read_object(finished_run.output("package") / "image.json")}


def _package_training(project: Project, config: Config, display: Display) -> dict[str, Any]:
    from pipeline.steps.package import package_training  # slow to load

    with contextlib.redirect_stdout(sys.stderr):  # the builder's output is for people
        return package_training(project, config, os.environ, display.report)


@app.command()
def deploy(
    context: typer.Context,
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[RUN] [KEY=VALUE…]", help="A run with a bundle, and overrides.")
    ] = None,
    render: Render = None,
    canary: Annotated[
        float | None, typer.Option("--canary", metavar="PERCENT", help="Share of the requests it gets at first.")
    ] = None,
    auto: Annotated[
        bool, typer.Option("--auto", help="On a cluster: measure the canary, then promote it or end it.")
    ] = False,
    cluster_context: KubeContext = None,
    watch: Annotated[
        bool,
        typer.Option("--watch", help="On a cluster: show pods, errors and latency of the old and the new version."),
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print what would change, field by field.")] = False,
    exit_code: Annotated[
        bool, typer.Option("--exit-code", help="With --dry-run: exit with 4 when something would change.")
    ] = False,
    output: OutputOption = Output.text,
) -> None:
    """Deploy the bundle of an earlier run, by default of the newest."""
    project = project_of(context)
    names, overrides = split_overrides(words)
    overrides += cluster_overrides(None, cluster_context)
    if render is not None:
        overrides += _render_overrides(project.config(overrides))
    overrides += canary_overrides(project.config(overrides).deploy.target, canary, auto)
    if dry_run:
        source = _find_deployable(project, names)
        config = deployment_config(project, source, overrides)
        if config.package != source.config.package:
            changes, text = [{"object": "image", "new": True, "fields": []}], "image: new; what follows depends on it"
        else:
            changes, text = _preview_deployment(project, source, config)
        emit(output, changes, text)
        if exit_code and changes:
            raise typer.Exit(4)
        return
    display, config = Display(live=sys.stderr.isatty()), project.config(overrides)
    if watch and not names and _continue_canary(project, config, display, output):
        return
    with lock_place(project.runs, config):
        source = _find_deployable(project, names)
        config = deployment_config(project, source, overrides)
        with _watch(project, config, display) if watch else contextlib.nullcontext():
            finished_run = run_and_report(display, lambda: redeploy(project, source, config, display))
    _copy_manifests(finished_run, render)
    emit_run(output, finished_run)


def _continue_canary(project: Project, config: Config, display: Display, output: Output) -> bool:
    """Go on with the canary on the cluster, which this or another machine began; return whether there is one."""
    with _watch(project, config, display):
        from k8s.deploy import continue_canary, find_canary  # slow to load
        from pipeline.monitor.canary import label_reader

        if find_canary(config) is None:
            return False
        access = Access.from_settings(config.serve, project.root)
        labels = label_reader(project.root, project.runs, config, display.report)
        version = continue_canary(config, access, display.report, functools.partial(find_bundle, project), labels)
    text = f"{version.title} gets all requests; {crown(project, config, version, 'canary promoted')}"
    emit(output, version.facts(), text)
    return True


def _watch(project: Project, config: Config, display: Display) -> contextlib.AbstractContextManager[None]:
    """Show the pods on the cluster while the deployment goes on."""
    if not config.deploy.on_cluster or config.deploy.render:
        raise ConfigError("--watch: shows the pods of a deployment on a cluster; set deploy.target, without --render")
    from k8s.cluster.cluster import Cluster  # slow to load
    from k8s.cluster.rollout_view import RolloutView, following

    headers = Access.from_settings(config.serve, project.root).headers()
    connect = functools.partial(Cluster.connect, config.deploy.context, config.deploy.namespace)
    view = RolloutView(connect, config.name, headers)
    return following(view, display.panel, display.report)


def _preview_deployment(project: Project, source: Run, config: Config) -> tuple[list[dict[str, Any]], str]:
    """Return what a deployment would change where it serves, and the lines that show it."""
    from pipeline.steps.deploy import lines, preview  # numpy is slow to load

    changes = preview(project, source, config, lambda text: print(text, file=sys.stderr))
    return changes, lines(changes)


def _find_deployable(project: Project, names: list[str]) -> Run:
    source = find_run(project.runs, names[0]) if names else newest_bundle(project)
    return find_deployable(project, source, lambda text: print(text, file=sys.stderr))


def newest_bundle(project: Project) -> Run:
    for run, body in load_history(project.runs):
        if "export" in body.steps and body.steps["export"].complete:
            return run
    raise ConfigError(f"no run in {project.runs} has a bundle yet; `pipe run --until export` makes one")


def cluster_overrides(executor: str | None, context: str | None) -> list[str]:
    options = {"cluster.executor": executor, "deploy.context": context}
    return [f"{key}={json.dumps(value)}" for key, value in options.items() if value is not None]


def canary_overrides(target: str, canary: float | None, auto: bool) -> list[str]:
    if auto and target == "local":
        raise ConfigError(
            "--auto: is for a cluster; here `pipe registry promote` or `pipe registry rollback` ends a canary"
        )
    overrides = [] if canary is None else [f"rollout.canary_percent={canary:g}"]
    return [*overrides, "rollout.auto=true"] if auto else overrides


def _render_overrides(config: Config) -> list[str]:
    return [*([] if config.deploy.on_cluster else ["deploy.target=kubernetes"]), "deploy.render=true"]


def _copy_manifests(run: Run, render: str | None) -> None:
    """Copy the manifests of a run to the folder that `--render DIR` names."""
    if render in (None, "default"):
        return
    from k8s.objects.manifests import remove_manifests

    directory = Path(str(render))
    directory.mkdir(parents=True, exist_ok=True)
    remove_manifests(directory)
    print(f"manifests are in {directory}; apply them with: kubectl apply --server-side -k {directory}", file=sys.stderr)
    for path in sorted((run.output("deploy") / "manifests").glob("*")):
        (directory / path.name).write_bytes(path.read_bytes())


def _emit_paths(output: Output, paths: list[Path]) -> None:
    emit(output, [str(path) for path in paths], "\n".join(map(str, paths)))


def emit_run(output: Output, run: Run) -> None:
    facts = run_facts(run)
    emit(output, facts, pairs(facts))


def run_facts(run: Run) -> dict[str, Any]:
    body = run.read()
    facts: dict[str, Any] = {"run": run.id, "path": str(run.path)}
    if (run.output("evaluate") / "verdict.json").exists():
        verdict = run.verdict()
        facts["verdict"] = f"{verdict['verdict']}: {verdict['summary']}"
        if (override := read_override(run.path)) is not None:
            facts["override"] = str(override)
    live = read_live(run.runs)
    if "deploy" in body.steps and live is not None and run.config.deploy.target == "local":
        facts["service"] = live.url
    facts["report"] = str(run.path / "report.html")
    facts["steps"] = {name: record.current_status for name, record in body.steps.items()}
    return facts
