"""Commands for the running service: serve, predict, stop."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from pipeline.cli.app import Output, OutputOption, app, emit, project_of
from pipeline.cli.export import Inputs, To, Weights, export_source, is_source
from pipeline.cli.run import newest_bundle
from pipeline.contract.bundle import Bundle, open_bundle
from pipeline.contract.run import Run, run_of_bundle
from pipeline.contract.settings.access import Access
from pipeline.contract.settings.stages import sampling_options
from pipeline.display import RowProgress
from pipeline.history import Project, find_run, lock_service
from pipeline.service.process import LiveService, read_live, send_request, stop_process, write_live
from pipeline.system.errors import BundleError, ConfigError, InvalidPayload, StageError
from pipeline.system.wording import seconds


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def serve(
    context: typer.Context,
    target: Annotated[
        str,
        typer.Argument(
            metavar="[RUN|BUNDLE|SOURCE]",
            help="Run, bundle, or a model as `pipe export` takes it; the newest run by default.",
        ),
    ] = "",
    to: To = None,
    weights: Weights = "",
    inputs: Inputs = None,
) -> None:
    """Serve a bundle, or a model that exists already, in the foreground.

    Further options are those of `python -m serve`.
    """
    options = list(context.args)
    if target.startswith("-"):
        options, target = [target, *options], ""
    if target and not (Path(target) / "manifest.json").is_file() and is_source(target):
        exported = export_source(target, to, weights, inputs or ())
        context.obj, target = exported.runs.parent, exported.id
    project = project_of(context)
    path = _find_bundle(project, target)
    settings = project.config().serve
    if settings.workers != 1 and not any(option.startswith("--workers") for option in options):
        options += ["--workers", str(settings.workers)]
    if not any(option.startswith("--sample") for option in options):
        options += sampling_options(settings, project.root)
    if "--require-signature" not in " ".join(options) and (trust := Access.from_settings(settings, project.root).trust):
        options += ["--require-signature", str(trust.path)]
    env = {**os.environ, "PYTHONSAFEPATH": "1"}
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, "-m", "serve", str(path), *options], env)


def _find_bundle(project: Project, target: str) -> Path:
    """Return the bundle of a folder or a run, or the newest one."""
    if not target or not (Path(target) / "manifest.json").is_file():
        return (find_run(project.runs, target) if target else newest_bundle(project)).bundle_to_serve()
    owner = run_of_bundle(Path(target))
    return Path(target) if owner is None else owner.bundle_to_serve()


@app.command()
def predict(
    context: typer.Context,
    file: Annotated[
        Path | None, typer.Argument(help='JSON file with {"instances": [...]} or a list; `-` reads standard input.')
    ] = None,
    output: Annotated[
        list[str] | None,
        typer.Option(
            "-o",
            "--output",
            help="`text` or `json` for the result here; with --bundle also a .parquet, .jsonl or .csv.",
        ),
    ] = None,
    bundle: Annotated[
        str, typer.Option(metavar="RUN|BUNDLE", help="Predict all rows of --input with it, without a service.")
    ] = "",
    source: Annotated[
        Path | None, typer.Option("--input", help="A .parquet, .csv or .jsonl file, or a folder of files.")
    ] = None,
    processes: Annotated[int, typer.Option(min=0, help="Processes; one for each usable core by default.")] = 0,
    shard: Annotated[
        str, typer.Option(metavar="I/N", help="Do the I-th of N shards; `auto` is that of an Indexed Job.")
    ] = "1/1",
    overwrite: Annotated[bool, typer.Option(help="Replace the output where it exists.")] = False,
) -> None:
    """Send a request to the live service, by default its examples; with --bundle, predict a file without a service."""
    files = [name for name in output or () if name not in tuple(Output)]
    shown = Output.json if Output.json in (output or ()) else Output.text
    if bundle:
        if source is None or len(files) != 1 or file is not None:
            raise ConfigError("--bundle: needs --input FILE_OR_FOLDER and one --output FILE, and no other file")
        from pipeline.service import bulk  # slow to load

        request = bulk.Request(
            _open_bundle(context, bundle), source, Path(files[0]), processes, parse_shard(shard),
            overwrite=overwrite,
        )  # fmt: skip
        with contextlib.closing(RowProgress()) as progress, contextlib.redirect_stdout(sys.stderr):
            result = bulk.predict(request, progress.report)
        speed = f"{result['rows']:,} rows in {seconds(result['seconds'])} ({result['rows_per_second']:,} rows/s)"
        place = result["output"] or "the other shards are not done"
        return emit(shown, result, f"{speed}: {place}")
    if files or source is not None:
        raise ConfigError(f"{files[0] if files else source}: a file needs --bundle RUN|BUNDLE; else -o is text or json")
    project = project_of(context)
    live = read_live(project.runs)
    if live is None or not live.alive:
        raise ConfigError("no service is live here; `pipe deploy` starts one")
    body = _read_instances(file) if file else _example(Run(project.runs / live.run))
    predictions = _predict(live, body)
    return emit(shown, predictions, json.dumps(predictions, indent=2))


def _open_bundle(context: typer.Context, name: str) -> Bundle:
    """Open the bundle of a folder or a run; a project is needed for a run, and may require signatures."""
    if (Path(name) / "manifest.json").is_file() and not (context.obj / "pipe.yaml").is_file():
        return open_bundle(Path(name))
    project = project_of(context)
    return open_bundle(_find_bundle(project, name), Access.from_settings(project.config().serve, project.root).trust)


def parse_shard(text: str) -> tuple[int, int]:
    """Parse `I/N`; `auto` is the number that Kubernetes gives to a pod of an Indexed Job, which begins with 0."""
    name, _, count = text.partition("/")
    if name == "auto" and (index := os.environ.get("JOB_COMPLETION_INDEX", "")).isdecimal():
        name = str(int(index) + 1)
    if not (name.isdecimal() and count.isdecimal() and 1 <= int(name) <= int(count)):
        raise ConfigError(f"--shard {text}: write I/N, as 1/4 to 4/4, or auto/N in a Job with completionMode Indexed")
    return int(name), int(count)


def _predict(live: LiveService, body: dict[str, Any]) -> Any:
    try:
        path = f"/v1/models/{live.name}:predict"
        code, headers, answer = send_request(live.host, live.port, "POST", path, body, access=live.access)
    except OSError as error:
        raise StageError(f"{live.url} does not answer ({error}); see `pipe logs service --run {live.run}`") from error
    if code != 200:
        message = answer.get("error", answer) if isinstance(answer, dict) else answer
        raise InvalidPayload(f"the service answered {code}: {message}")
    digest = headers.get("x-bundle-digest", "?")
    deployed = [live.bundle, *([live.canary.bundle] if live.canary else [])]
    if digest not in deployed:
        raise BundleError(
            f"{live.url} answered with bundle {digest[:12]}, but {' and '.join(name[:12] for name in deployed)} was "
            "deployed; `pipe deploy` starts the right one"
        )
    print(f"bundle {digest[:12]}", file=sys.stderr)
    return answer


def _example(run: Run) -> dict[str, Any]:
    golden = run.bundle().golden()
    if not golden.instances:
        raise ConfigError("the task has no example(); give a file with instances")
    return {"instances": golden.instances}


def _read_instances(file: Path) -> dict[str, Any]:
    try:
        text = sys.stdin.read() if str(file) == "-" else file.read_text()
        value = json.loads(text, parse_constant=_missing_number)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: {error}") from error
    return value if isinstance(value, dict) else {"instances": value}


def _missing_number(constant: str) -> None:
    """Read NaN, which Python writes for a missing number, as the null that JSON has."""
    if constant != "NaN":
        raise ValueError(f"{constant} is not valid in JSON")


@app.command()
def stop(context: typer.Context, output: OutputOption = Output.text) -> None:
    """Stop the live service after the requests it has accepted."""
    project = project_of(context)
    if read_live(project.runs) is None:
        return emit(output, {"ended": False}, "no service was running")
    with lock_service(project.runs):
        live = read_live(project.runs)
        was_running = live is not None and stop_process(live.pid, live.process_started)
        write_live(project.runs, None)
    text = f"stopped {live.name} at {live.url} (pid {live.pid})" if live and was_running else "no service was running"
    return emit(output, {"ended": was_running}, text)
