"""Errors that a user can fix, the files by which a step reports one, and the extra that installs a missing module."""

from __future__ import annotations

import contextlib
import json
import re
import socket
from importlib import metadata
from pathlib import Path
from typing import Literal


class PipelineError(Exception):
    """An error that the reader can fix: one sentence with what, where and how to fix it."""

    exit_code = 2
    ending: Literal["failed", "rejected", "interrupted"] = "failed"  # status in the step's record
    keeps_output = False  # True: the step's output is complete and is kept, although the pipeline stops
    echo = False  # True: it is a consequence of a failure in another process
    passing = False  # True: a restart may succeed, as after a lost machine


class ConfigError(PipelineError):
    """An error in `pipe.yaml`, an override, or the task and codec they name."""


class DataError(PipelineError):
    """Data, or outputs of the model, that cannot be trained on or evaluated."""


class ResourceError(PipelineError):
    """A resource that the machine lacks: disk space, a free port, the lock of the runs directory."""


class BundleError(PipelineError):
    """A bundle that is damaged, tampered with or incomplete; it must not be served."""


class InvalidPayload(PipelineError):
    """A prediction request that is not valid; codecs raise it, and the service answers 400."""


class StageError(PipelineError):
    """A failure of a step that is not caused by the user's input."""

    exit_code = 1


class LostContact(StageError):
    """The loss of another process; the error of that process, if it wrote one, is reported instead."""

    echo = True
    passing = True


class Stalled(StageError):
    """A hang: all processes wait for one that makes no progress."""

    passing = True


class DeviceFault(StageError):
    """A fault of an accelerator or of its connection, and not of the program: another attempt may succeed."""

    exit_code = 69
    passing = True


class GateError(PipelineError):
    """A rejection by the quality gate."""

    exit_code = 3
    ending = "rejected"
    keeps_output = True


class ClusterError(StageError):
    """A failed connection to the cluster; the manifests are written and can be applied by hand."""

    keeps_output = True


class ConflictError(ConfigError):
    """Settings that are valid one by one but cannot be combined."""


class Pruned(PipelineError):
    """A trial of `pipe tune` that was stopped early because others were better."""


class Interrupted(PipelineError):
    """Ctrl-C, or a closed terminal."""

    exit_code = 130
    ending = "interrupted"


class Evicted(Interrupted):
    """SIGTERM, after which training saved a checkpoint and exited."""

    passing = True


def _kinds(kind: type[PipelineError]) -> dict[str, type[PipelineError]]:
    classes = {kind.__name__: kind}
    for child in kind.__subclasses__():
        classes |= _kinds(child)
    return classes


_FILE, _PASSING_FILE, _ECHO_FILE = "error.json", "error-passing.json", "error-echo.json"


def write_error(error: PipelineError, directory: Path) -> None:
    """Write the error to a file that the runner reads; if several ranks fail, the first error is kept.

    Errors after which training may restart have a separate file, so that a later, final error can still be written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    body = json.dumps({"kind": type(error).__name__, "message": str(error)})
    path = directory / (_ECHO_FILE if error.echo else _PASSING_FILE if error.passing else _FILE)
    with contextlib.suppress(FileExistsError), path.open("x") as file:
        file.write(body)


def read_error(directory: Path) -> PipelineError | None:
    """Return the error that a step wrote, if any; an error that is a consequence of another one comes last."""
    for path in (directory / _FILE, directory / _PASSING_FILE, directory / _ECHO_FILE):
        with contextlib.suppress(FileNotFoundError, ValueError, KeyError, TypeError):  # a damaged one is ignored
            body = json.loads(path.read_text())
            return _kinds(PipelineError).get(body["kind"], PipelineError)(body["message"])
    return None


def clear_error(directory: Path) -> None:
    clear_passing(directory)
    (directory / _FILE).unlink(missing_ok=True)


def clear_passing(directory: Path) -> None:
    """Remove the errors that led to a restart, when training continues."""
    for name in (_PASSING_FILE, _ECHO_FILE):
        (directory / name).unlink(missing_ok=True)


EXTRAS = {  # extra: the modules it installs, by the names they are imported by
    "train": ("onnx", "onnxscript", "safetensors", "tensorboard", "torch"),
    "serve": ("msgspec", "onnxruntime", "simdjson", "tokenizers"),
    "cluster": ("kubernetes", "urllib3"),
    "data": ("PIL", "datasets", "pyarrow"),
    "deepseek": ("peft", "transformers"),
    "examples": ("sklearn",),
    "genai": ("onnxruntime_genai",),
    "mlflow": ("alembic", "mlflow", "sqlalchemy"),
    "qlora": ("bitsandbytes",),
    "registry": ("fsspec", "s3fs"),
    "savedmodel": ("ai_edge_litert", "onnx2tf", "onnx_graphsurgeon", "sng4onnx", "tensorflow", "tf_keras"),
    "sign": ("cryptography",),
    "tune": ("optuna",),
    "wandb": ("wandb",),
}
# Also with `-gpu`. ONNX Runtime for CPUs must not be installed over the one for GPUs: both are the same module.
_EXTRAS_WITH_RUNTIME = ("serve", "train", "all")
_EXTRA_OF = {module: extra for extra, modules in EXTRAS.items() for module in modules}
# Torch marks lines with their rank, and logs of a Job have the pod's number.
_IMPORT_FAILED = re.compile(r"^(?:\[(?:rank)?\d+\]:? )*ModuleNotFoundError: No module named '([\w.]+)'", re.MULTILINE)


def missing_extra(error: BaseException) -> ConfigError | None:
    """Return the error for a module that an extra installs; None for any other error, a module of the user's included.

    The cause counts too: libraries such as fsspec raise an ImportError of their own from it.
    """
    while error.__cause__ is not None and not isinstance(error, ModuleNotFoundError):
        error = error.__cause__
    return _missing_module(error.name or "") if isinstance(error, ModuleNotFoundError) else None


def missing_module_in_log(log: str) -> ConfigError | None:
    """Return the error for a process that ended while it imported its modules, before it could report anything."""
    names = _IMPORT_FAILED.findall(log)
    if not names:
        return None
    return _missing_module(names[-1]) or ConfigError(
        f"the module `{names[-1]}` is not installed; to fix it: install its package where this step runs"
    )


def _missing_module(name: str) -> ConfigError | None:
    module = name.partition(".")[0]
    extra = _EXTRA_OF.get(module)
    if extra is None:
        return None
    return ConfigError(f"the module `{module}` is not installed; to fix it: {install_command(extra)}")


def disk_full(path: object, command: str) -> ResourceError:
    """Return the error for a full disk; `command` goes on after some space was freed."""
    return ResourceError(f"disk full on {socket.gethostname()} under {path}; free some space, then {command}")


def install_command(extra: str) -> str:
    """Return the command that installs an extra and keeps the ONNX Runtime that is installed."""
    gpu = "-gpu" if extra in _EXTRAS_WITH_RUNTIME and _is_installed("onnxruntime-gpu") else ""
    return f"pip install 'pipe-road[{extra}{gpu}]'"


def _is_installed(distribution: str) -> bool:
    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True
