"""The command line: `pipe`. Commands are thin; what they do stands in the modules they call."""

from __future__ import annotations

import errno
import re
import signal
import sys
from collections.abc import Sequence
from types import FrameType

import typer

from pipeline.cli import experiments, gate, inspect, project, registry, run, service
from pipeline.cli.app import app
from pipeline.contract.errors import ConfigError, PipelineError
from pipeline.contract.processes import watch_parent

__all__ = ["app", "experiments", "gate", "inspect", "main", "project", "registry", "run", "service"]

_RUN = re.compile(r"latest$|\d|[^=]*/")  # what can follow `--resume` and be a run: no step or key begins so


def main() -> None:
    signal.signal(signal.SIGTERM, _leave)
    watch_parent()  # of `pipe chaos`, which types commands
    try:
        sys.exit(app(with_defaults(sys.argv[1:]), prog_name="pipe", standalone_mode=False))
    except typer.TyperException as error:  # a word that is no command, an option without its value
        print(usage_line(error), file=sys.stderr)
        sys.exit(ConfigError.exit_code)
    except PipelineError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except OSError as error:
        mends = {
            errno.ENOSPC: "disk full; free some space, then `pipe run --resume`",
            errno.EACCES: f"{error.filename}: permission denied",
            errno.EROFS: f"{error.filename}: the file system is read-only",
        }
        if error.errno not in mends:
            raise
        print(f"error: {mends[error.errno]}", file=sys.stderr)
        sys.exit(PipelineError.exit_code)


def usage_line(error: typer.TyperException) -> str:
    """One line, as every other mistake; `pipe` alone has nothing to say but its help."""
    context: typer.Context | None = getattr(error, "ctx", None)
    if context is None or error.message == context.get_help():
        return error.format_message()
    return f"error: {error.format_message().rstrip('.?')}; see `{context.command_path} --help`"


def with_defaults(argv: Sequence[str]) -> list[str]:
    """Fill in the value of `--resume` and `--render` when they stand alone: typer has no optional values."""
    found = []
    for i, word in enumerate(argv):
        found.append(word)
        following = argv[i + 1] if i + 1 < len(argv) else ""
        if word == "--resume" and not _RUN.match(following):
            found.append("latest")
        if word == "--render" and (not following or following.startswith("-") or "=" in following):
            found.append("default")
    return found


def _leave(signal_number: int, _frame: FrameType | None) -> None:
    """As Ctrl-C: steps are ended and the run stays resumable."""
    raise KeyboardInterrupt(signal_number)
