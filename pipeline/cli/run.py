"""Commands that walk the road: plan, run, deploy.

The command that makes images: `pipe package`.

The command that writes what other engines run.

The command by which other machines take part in training.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from pipeline.cli.app import Output, OutputOption, app, emit, project_of, table
from pipeline.cli.inspect import RunName
from pipeline.contract.config import Config, override_config
from pipeline.contract.errors import ConfigError, Interrupted
from pipeline.contract.override import read_override
from pipeline.contract.run import STEPS, Run, RunFile, all_runs
from pipeline.display import Display
from pipeline.history import Project, find_run, load_history, locked
from pipeline.plan import choose, with_upstream
from pipeline.runner import AGAIN, Order, Road, latest_unfinished, redeploy, resume_road, run_road
from pipeline.service.process import read_live

Words = Annotated[list[str] | None, typer.Argument(metavar="[STEP…] [KEY=VALUE…]", help="`all`, steps, overrides.")]
From = Annotated[str | None, typer.Option("--from", help="First step; the ones before it must be up to date.")]
Until = Annotated[str | None, typer.Option("--until", help="Last step.")]
Force = Annotated[list[str] | None, typer.Option("--force", help="Run this step though nothing changed; or `all`.")]
Resume = Annotated[
    str | None, typer.Option("--resume", metavar="[RUN]", help="Go on with a stopped run; overrides say where.")
]
Executor = Annotated[str | None, typer.Option("--executor", metavar="[local|kubernetes]", help="Where steps run.")]
Context = Annotated[str | None, typer.Option("--context", help="Context of the kubeconfig; else the current one.")]
Render = Annotated[str | None, typer.Option("--render", metavar="[DIR]", help="Only write Kubernetes manifests.")]


@app.command()
def plan(
    context: typer.Context,
    words: Words = None,
    start: From = None,
    until: Until = None,
    force: Force = None,
    exit_code: Annotated[bool, typer.Option("--exit-code", help="Exit with 4 when something would run.")] = False,
    output: OutputOption = Output.text,
) -> None:
    """Say what would run, and why."""
    project = project_of(context)
    names, overrides = split_words(words)
    order = make_order(names, start, until, force)
    steps = Road(project, project.config(overrides), order, load_history(project.runs)).preview()
    rows = [{"step": step.name, "action": step.action, "reason": step.reason} for step in steps]
    emit(output, [asdict(step) for step in steps], table(rows))
    if exit_code and any(step.action == "run" and step.name != "deploy" for step in steps):
        raise typer.Exit(4)


@app.command()
def run(
    context: typer.Context,
    words: Words = None,
    start: From = None,
    until: Until = None,
    force: Force = None,
    resume: Resume = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="The same as `pipe plan`.")] = False,
    render: Render = None,
    executor: Executor = None,
    cluster_context: Context = None,
    output: OutputOption = Output.text,
) -> None:
    """Walk the road: all of it, or the named steps and what they need."""
    if dry_run:
        return plan(context, words, start, until, force, output=output)
    project = project_of(context)
    names, overrides = split_words(words)
    overrides += where(executor, cluster_context)
    if render is not None:
        if names == ["train"]:
            from pipeline.render import render_training  # other commands do without the manifests

            return emit_paths(output, render_training(project, project.config(overrides), render))
        overrides += ["deploy.target=kubernetes", "deploy.render=true"]
    display = Display(live=sys.stderr.isatty())
    if project.embedded:
        display.say("no pipe.yaml here: this is the digits example; `pipe init my-model` starts your own")
    with locked(_runs_of(project, resume)):
        if resume is not None:
            found = _resume(project, resume, names, overrides, display)
        else:
            config, order = project.config(overrides), make_order(names, start, until, force)
            found = finish(project, lambda: run_road(project, config, order, display))
    _copy_manifests(found, render)
    emit_run(output, found)
    return None


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
        bool, typer.Option("--auto", help="On a cluster: go on to all requests, or back, by what is measured.")
    ] = False,
    force_reason: Annotated[
        str | None, typer.Option("--force-reason", metavar="WHY", help="Deploy a bundle that failed its gate.")
    ] = None,
    cluster_context: Context = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would change, field by field.")] = False,
    exit_code: Annotated[bool, typer.Option("--exit-code", help="With --dry-run: exit with 4 when it would.")] = False,
    output: OutputOption = Output.text,
) -> None:
    """Deploy the bundle of a run that is there already."""
    project = project_of(context)
    names, overrides = split_words(words)
    overrides += where(None, cluster_context)
    if dry_run:
        source = find_run(project.runs, names[0]) if names else newest_bundle(project)
        return _preview(project, source, overrides, (canary, auto, force_reason), exit_code, output)
    if render is not None:
        overrides += ["deploy.target=kubernetes", "deploy.render=true"]
    display = Display(live=sys.stderr.isatty())
    with locked(project.runs):
        source = find_run(project.runs, names[0]) if names else newest_bundle(project)
        target = override_config(source.config, overrides).deploy.target
        overrides += taking_over(target, canary, auto, force_reason)
        found = finish(project, lambda: redeploy(project, source, overrides, display))
    _copy_manifests(found, render)
    emit_run(output, found)
    return None


def _preview(
    project: Project,
    source: Run,
    overrides: list[str],
    options: tuple[float | None, bool, str | None],
    exit_code: bool,
    output: Output,
) -> None:
    from pipeline.steps.deploy import (
        lines,
        preview,  # numpy is slow to load
    )

    target = override_config(source.config, overrides).deploy.target
    words = [*overrides, *taking_over(target, *options)]
    changes = preview(project, source, words, lambda text: print(text, file=sys.stderr))
    emit(output, changes, lines(changes))
    if exit_code and changes:
        raise typer.Exit(4)


def where(executor: str | None, context: str | None) -> list[str]:
    """Options that are words of the configuration."""
    given = {"jobs.executor": executor, "deploy.context": context}
    return [f"{key}={json.dumps(value)}" for key, value in given.items() if value is not None]


def taking_over(target: str, canary: float | None, auto: bool, force_reason: str | None) -> list[str]:
    """Options of a roll-out as words; here a canary shares one process, on a cluster it has pods of its own."""
    if target == "local":
        if auto:
            raise ConfigError("--auto: is for a cluster; here `pipe promote` or `pipe rollback` ends a canary")
        if force_reason:
            raise ConfigError(
                "--force-reason: is for a cluster; here a run goes past its gate by `pipe gate override RUN`"
            )
        return [] if canary is None else [f"serve.canary='{canary:g}%'"]
    words = [] if canary is None else [f"rollout.canary={canary:g}"]
    words += ["rollout.auto=true"] if auto else []
    return words + ([f"rollout.force_reason={json.dumps(force_reason)}"] if force_reason else [])


def split_words(words: list[str] | None) -> tuple[list[str], list[str]]:
    """Names, and `key=value` overrides."""
    words = words or []
    return [word for word in words if "=" not in word], [word for word in words if "=" in word]


def make_order(names: list[str], start: str | None, until: str | None, force: list[str] | None) -> Order:
    wanted = choose(names, start, until)
    forced = frozenset(STEPS if "all" in (force or []) else force or [])
    if unknown := sorted(forced - set(STEPS)):
        raise ConfigError(f"--force {unknown[0]}: no such step; there are {', '.join(STEPS)}, and all")
    walked = with_upstream(wanted)
    before = frozenset(STEPS[: STEPS.index(start)]) if start else frozenset()
    return Order(walked, forced, before & set(walked))


def newest_bundle(project: Project) -> Run:
    for run, body in load_history(project.runs):
        if "export" in body.steps and body.steps["export"].complete and not _only_rendered(run, body):
            return run
    raise ConfigError(f"no run in {project.runs} has a bundle yet; `pipe run --until export` makes one")


def _only_rendered(run: Run, body: RunFile) -> bool:
    """`pipe deploy --render` has deployed nothing: its words are not those of the next deployment."""
    return body.steps["export"].reason == AGAIN and run.config.deploy.render


def _copy_manifests(run: Run, render: str | None) -> None:
    """`--render DIR` wants them there too."""
    if render in (None, "default"):
        return
    from k8s.objects.manifests import clear

    directory = Path(str(render))
    directory.mkdir(parents=True, exist_ok=True)
    clear(directory)
    print(f"manifests are in {directory}; apply them with: kubectl apply --server-side -k {directory}", file=sys.stderr)
    for path in sorted((run.output("deploy") / "manifests").glob("*")):
        (directory / path.name).write_bytes(path.read_bytes())


def emit_paths(output: Output, paths: list[Path]) -> None:
    emit(output, [str(path) for path in paths], "\n".join(map(str, paths)))


def emit_run(output: Output, run: Run) -> None:
    facts = run_facts(run)
    emit(output, facts, "\n".join(f"{name:8} {value}" for name, value in facts.items() if not isinstance(value, dict)))


def run_facts(run: Run) -> dict[str, Any]:
    body = run.read()
    facts: dict[str, Any] = {"run": run.id, "path": str(run.path)}
    if (run.output("evaluate") / "verdict.json").exists():
        verdict = run.verdict()
        facts["verdict"] = f"{verdict['verdict']}: {verdict['summary']}"
        if (given := read_override(run.path)) is not None:
            facts["override"] = str(given)
    live = read_live(run.runs)
    if "deploy" in body.steps and live is not None and run.config.deploy.target == "local":
        facts["service"] = live.url
    facts["report"] = str(run.path / "report.html")
    facts["steps"] = {name: record.status for name, record in body.steps.items()}
    return facts


def _runs_of(project: Project, resume: str | None) -> Path:
    """A run that is named by its path may stand in another folder of runs."""
    named = Path(resume) if resume else project.runs
    return named.resolve().parent if (named / "run.json").is_file() else project.runs


def _resume(project: Project, name: str, names: list[str], overrides: list[str], display: Display) -> Run:
    chosen = with_upstream(choose(names, None, None)) if names else ()
    found = latest_unfinished(project) if name == "latest" else find_run(project.runs, name)
    wanted = chosen or found.read().wanted
    display.say(f"resuming run {found.id}")
    return finish(project, lambda: resume_road(project, found, Order(wanted), display, overrides), resumed=found)


def finish(project: Project, walk: Callable[[], Run], resumed: Run | None = None) -> Run:
    """However the walk ends, its run gets a report, and Ctrl-C a line that says how to go on."""
    before = {run.id for run in all_runs(project.runs)}
    try:
        found = walk()
    except BaseException as error:
        made = next((run for run in all_runs(project.runs) if run.id not in before), resumed)
        if made is not None:
            _report_failure(made)
        if isinstance(error, KeyboardInterrupt):
            hint = f"pipe run --resume {made.id}" if made else "pipe run all"
            raise Interrupted(f"interrupted; nothing is lost, `{hint}` goes on") from None
        raise
    from pipeline.report.page import write_report  # `--help` does without its pages

    write_report(found, found.path / "report.html")
    return found


def _report_failure(run: Run) -> None:
    """The report of a run that failed must not hide why it failed."""
    from pipeline.report.page import write_report

    try:
        write_report(run, run.path / "report.html")
    except Exception as problem:
        print(f"warning: no report: {type(problem).__name__}: {problem}", file=sys.stderr)


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
    from pipeline.steps.package import package_training  # other commands do without the locks of images

    with contextlib.redirect_stdout(sys.stderr):  # what the builder says is for people
        return package_training(project, config, os.environ, display.say)


WorkflowWords = Annotated[
    list[str], typer.Argument(metavar="workflow [DIR] [KEY=VALUE…]", help="What, where, and overrides.")
]


@app.command()
def render(
    context: typer.Context,
    words: WorkflowWords,
    engine: Annotated[str, typer.Option("--engine", metavar="argo|kfp", help="Argo or Kubeflow Pipelines.")] = "argo",
    output: OutputOption = Output.text,
) -> None:
    """Write the whole road as a workflow: the same steps, commands and image as `pipe run`."""
    names, overrides = split_words(words)
    if names[:1] != ["workflow"] or len(names) > 2:
        raise ConfigError(f"pipe render {' '.join(names)}: write it as `pipe render workflow [DIR] [KEY=VALUE…]`")
    from pipeline.render import (
        lacking,
        render_workflow,  # other commands do without the manifests
    )

    project = project_of(context)
    config, directory = project.config(overrides), names[1] if len(names) == 2 else "default"
    emit_paths(output, render_workflow(project, config, engine, directory))
    if found := lacking(config):
        typer.echo(f"note: {found}", err=True)


@app.command()
def join(context: typer.Context, run: RunName = "latest") -> None:
    """Train along with the machine that runs `pipe run`, until training is through."""
    from pipeline.training.node import serve  # other commands do without what starts processes

    project = project_of(context)
    found = find_run(project.runs, run)
    check(found)
    try:
        status = serve(found, project.root, joined=True, train=found.config.train)
    except KeyboardInterrupt:
        raise Interrupted(f"this machine has left training; `pipe join {found.id}` brings it back") from None
    sys.exit(status)


def check(run: Run) -> None:
    """There is something to take part in."""
    train, record = run.config.train, run.read().steps.get("train")
    if train.launcher != "torchrun" or train.most_nodes == 1:
        raise ConfigError(
            f"run {run.id} has train.nodes={train.nodes} and train.launcher={train.launcher}; machines join where "
            "nodes is above 1, as in train.nodes=2:4, and the launcher is torchrun"
        )
    if record is not None and record.complete:
        raise ConfigError(f"run {run.id} has trained to its end; there is nothing to join")
