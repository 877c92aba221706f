"""The errors a user can mend, and how one travels from a step's process to the command line."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from pathlib import Path
from typing import Literal


class PipelineError(Exception):
    """A mistake the reader can mend: its message says what, where and how. Printed as one line."""

    exit_code = 2
    ending: Literal["failed", "rejected", "interrupted"] = "failed"  # of the step, in its record
    complete = False  # True: the step's output is whole and is kept, though the road stops
    echo = False  # True: it follows from a failure elsewhere
    passing = False  # True: trying again may well succeed, as after a lost machine


class ConfigError(PipelineError):
    """`pipe.yaml`, an override, or the task and codec it names are wrong."""


class DataError(PipelineError):
    """The data, or what the model makes of it, cannot be trained or judged on."""


class ResourceError(PipelineError):
    """The machine lacks something: disk, a free port, the lock of the runs directory."""


class BundleError(PipelineError):
    """A bundle that is damaged, tampered with or incomplete; it must not be served."""


class InvalidPayload(PipelineError):
    """A prediction request that cannot be understood; codecs raise it, the service answers 400."""


class StageError(PipelineError):
    """A step failed for a reason that is not the user's input."""

    exit_code = 1


class LostContact(StageError):
    """Another process failed, was killed or hangs: its own error, where it left one, is the one to show."""

    echo = True
    passing = True


class Stalled(StageError):
    """All wait for a process that does not move."""

    passing = True


class GateError(PipelineError):
    """The candidate was judged and rejected."""

    exit_code = 3
    ending = "rejected"
    complete = True


class ClusterError(StageError):
    """No cluster took the manifests; they are rendered and can be applied by hand."""

    complete = True


class ConflictError(ConfigError):
    """Settings that are fine one by one and do not go together."""


class Pruned(PipelineError):
    """A trial of `pipe tune` that was ended early: others did better."""


class Interrupted(PipelineError):
    """Ctrl-C, or the terminal went away."""

    exit_code = 130
    ending = "interrupted"


class Evicted(Interrupted):
    """SIGTERM: training has made a checkpoint and left."""

    passing = True


def _kinds(kind: type[PipelineError]) -> dict[str, type[PipelineError]]:
    found = {kind.__name__: kind}
    for child in kind.__subclasses__():
        found |= _kinds(child)
    return found


_FILE, _PASSING_FILE, _ECHO_FILE = "error.json", "error-passing.json", "error-echo.json"


def write_error(error: PipelineError, directory: Path) -> None:
    """Leave the error where the runner finds it; of several ranks that fail, the first one with a cause is kept.

    A passing one has a file of its own: training may go on, and a later one that ends it must not find its place taken.
    """
    directory.mkdir(parents=True, exist_ok=True)
    body = json.dumps({"kind": type(error).__name__, "message": str(error)})
    own = directory / f".error-{socket.gethostname()}-{os.getpid()}"
    own.write_text(body)
    with contextlib.suppress(FileExistsError):  # link() is atomic and never replaces: first one wins
        os.link(own, directory / (_ECHO_FILE if error.echo else _PASSING_FILE if error.passing else _FILE))
    own.unlink()


def read_error(directory: Path) -> PipelineError | None:
    """The error a step left behind, if it left one; an echo only where nobody left the cause."""
    for path in (directory / _FILE, directory / _PASSING_FILE, directory / _ECHO_FILE):
        if path.exists():
            body = json.loads(path.read_text())
            return _kinds(PipelineError).get(body["kind"], PipelineError)(body["message"])
    return None


def clear_error(directory: Path) -> None:
    clear_passing(directory)
    (directory / _FILE).unlink(missing_ok=True)


def clear_passing(directory: Path) -> None:
    """Training goes on: what made it begin again is no longer why it ends."""
    for name in (_PASSING_FILE, _ECHO_FILE):
        (directory / name).unlink(missing_ok=True)
