"""The command line `pipe`. Commands are thin: the work is done in the modules they call."""

from __future__ import annotations

import errno
import gc
import json
import os
import re
import signal
import sys
from collections.abc import Sequence
from types import FrameType

import typer

from pipeline.cli import experiments, export, inspect, monitor, project, registry, run, service
from pipeline.cli.app import app
from pipeline.system.errors import ConfigError, Interrupted, PipelineError, disk_full, missing_extra
from pipeline.system.processes import TERMINATED, watch_parent

__all__ = ["app", "experiments", "export", "inspect", "main", "monitor", "project", "registry", "run", "service"]

_RUN = re.compile(r"latest$|\d|[^=]*/")  # a run after `--resume`; no step and no setting begins like this
_FOLDER_OPTIONS = ("-C", "--project")
_signals: list[int] = []  # that interrupted this process


def main() -> None:
    gc.freeze()  # what the imports made lives until the end; walking it again costs a tenth of a short command
    signal.signal(signal.SIGTERM, _interrupt)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup sets it
        signal.signal(signal.SIGHUP, _interrupt)
    watch_parent()  # `pipe chaos` starts commands, which must end with it
    try:
        sys.exit(_exit_code(app(complete_arguments(sys.argv[1:]), prog_name="pipe", standalone_mode=False)))
    except typer.TyperException as error:  # an unknown command, an option without its value
        text = usage_error(error)
        if not text.startswith("error: "):  # the help of `pipe` alone
            print(text, file=sys.stderr)
            sys.exit(ConfigError.exit_code)
        _exit_with(ConfigError(text.removeprefix("error: ")))
    except PipelineError as error:
        _exit_with(error)
    except ImportError as error:
        missing = missing_extra(error)
        if missing is None:
            raise
        _exit_with(missing)
    except OSError as error:
        fixes = {
            errno.ENOSPC: str(disk_full(error.filename or os.getcwd(), "repeat this command")),
            errno.EACCES: f"{error.filename}: permission denied",
            errno.EROFS: f"{error.filename}: the file system is read-only",
        }
        if error.errno not in fixes:
            raise
        _exit_with(PipelineError(fixes[error.errno]))


def _exit_with(error: PipelineError) -> None:
    print(f"error: {error}", file=sys.stderr)
    exit_code = _exit_code(error.exit_code)
    if _wants_json(sys.argv[1:]):
        print(json.dumps({"error": str(error), "kind": type(error).__name__, "exit_code": exit_code}))
    sys.exit(exit_code)


def _exit_code(status: int | None) -> int | None:
    """Return 143 for an interruption by SIGTERM, as supervisors expect it."""
    return TERMINATED if status == Interrupted.exit_code and signal.SIGTERM in _signals else status


def _wants_json(argv: Sequence[str]) -> bool:
    pairs = zip(argv, [*argv[1:], ""], strict=True)
    return any(pair in (("-o", "json"), ("--output", "json")) for pair in pairs) or "--output=json" in argv


def usage_error(error: typer.TyperException) -> str:
    """Return one line, as for every other mistake; for `pipe` alone, its help."""
    context: typer.Context | None = getattr(error, "ctx", None)
    if context is None or error.message == context.get_help():
        return error.format_message()
    return f"error: {error.format_message().rstrip('.?')}; see `{context.command_path} --help`"


def complete_arguments(argv: Sequence[str]) -> list[str]:
    """Move `-C DIR` to the front, and give `--resume` and `--render` their values: typer has no optional values."""
    folder, arguments = _split_folder(argv)
    complete = []
    for i, argument in enumerate(arguments):
        complete.append(argument)
        next_argument = arguments[i + 1] if i + 1 < len(arguments) else ""
        if argument == "--resume" and not _RUN.match(next_argument):
            complete.append("latest")
        if argument == "--render" and (not next_argument or next_argument.startswith("-") or "=" in next_argument):
            complete.append("default")
    return [*folder, *complete]


def _split_folder(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    end = argv.index("--") if "--" in argv else len(argv)
    folder: list[str] = []
    remainder: list[str] = []
    i = 0
    while i < end:
        if argv[i] in _FOLDER_OPTIONS:
            folder += argv[i : min(i + 2, end)]
            i += 2
            continue
        (folder if argv[i].startswith("--project=") else remainder).append(argv[i])
        i += 1
    return folder, [*remainder, *argv[end:]]


def _interrupt(signal_number: int, _frame: FrameType | None) -> None:
    """Handle the signal like Ctrl-C: end the steps and keep the run resumable."""
    _signals.append(signal_number)
    raise KeyboardInterrupt(signal_number)
