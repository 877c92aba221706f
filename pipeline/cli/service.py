"""Commands for the running service: serve, predict, stop."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from pipeline.cli.app import Output, OutputOption, app, emit, project_of
from pipeline.cli.run import newest_bundle
from pipeline.contract.run import Run, run_of_bundle
from pipeline.contract.settings.access import Access
from pipeline.history import find_run, lock_service
from pipeline.service.process import LiveService, read_live, send_request, stop_process, write_live
from pipeline.system.errors import BundleError, ConfigError, InvalidPayload, StageError


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def serve(
    context: typer.Context,
    target: Annotated[str, typer.Argument(metavar="[RUN|BUNDLE]", help="Run or bundle; the newest by default.")] = "",
) -> None:
    """Serve a bundle in the foreground.

    Further options are those of `python -m serve`.
    """
    options = list(context.args)
    if target.startswith("-"):
        options, target = [target, *options], ""
    project = project_of(context)
    if target and (Path(target) / "manifest.json").is_file():
        path = Path(target)
        if (owner := run_of_bundle(path)) is not None:
            path = owner.bundle_to_serve()
    else:
        path = (find_run(project.runs, target) if target else newest_bundle(project)).bundle_to_serve()
    settings = project.config().serve
    if settings.workers != 1 and not any(option.startswith("--workers") for option in options):
        options += ["--workers", str(settings.workers)]
    if "--require-signature" not in " ".join(options) and (trust := Access.from_settings(settings, project.root).trust):
        options += ["--require-signature", str(trust.path)]
    env = {**os.environ, "PYTHONSAFEPATH": "1"}
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, "-m", "serve", str(path), *options], env)


@app.command()
def predict(
    context: typer.Context,
    file: Annotated[
        Path | None, typer.Argument(help='JSON file with {"instances": [...]} or a list; `-` reads standard input.')
    ] = None,
    output: OutputOption = Output.text,
) -> None:
    """Send a request to the live service, by default its examples."""
    project = project_of(context)
    live = read_live(project.runs)
    if live is None or not live.alive:
        raise ConfigError("no service is live here; `pipe deploy` starts one")
    body = _read_instances(file) if file else _example(Run(project.runs / live.run))
    predictions = _predict(live, body)
    emit(output, predictions, json.dumps(predictions, indent=2))


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
