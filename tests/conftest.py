"""Fixtures of all tests: the user code that one test imports is removed before the next."""

from __future__ import annotations

import copy
import functools
import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import typer.main

_EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
# Files whose tests share little, so that each of them can run in any process.
_SPREAD = ("tests/damages/", "tests/breaks/")
# Long tests begin first, so that no process runs one alone at the end. `e2e/test_pipeline.py` makes the run that all
# of e2e waits for.
_FIRST = ("tests/nodes/", "tests/e2e/test_pipeline.py", "tests/train/parallel/", "tests/e2e/", "tests/train/")
# A shell starts a background job with Ctrl-C ignored, and nohup one that a closed terminal does not end; the commands
# under test would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
# Read when torch loads. Tests run side by side and compute little: threads that wait for work actively would take the
# cores from the other tests.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
gc.disable()  # until everything is imported
_others: dict[str, ModuleType] = {}  # modules outside of projects, cached because there are thousands
_newest = ""  # the last imported module after the last test


@pytest.fixture(autouse=True)
def _remove_user_code(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Remove modules of projects: a `codec` left in sys.modules would be used by the next project."""
    yield
    global _newest
    users = (f"{_EXAMPLES}{os.sep}", f"{tmp_path_factory.getbasetemp().resolve()}{os.sep}")
    sys.path[:] = [place for place in sys.path if not f"{place}{os.sep}".startswith(users)]
    if next(reversed(sys.modules)) == _newest:
        return  # nothing was imported
    new = [(name, module) for name, module in sys.modules.items() if _others.get(name) is not module]
    for name, module in new:
        is_project = f"{module.__name__}.".startswith("pipeline.project.") if isinstance(module, ModuleType) else False
        if is_project or (getattr(module, "__file__", None) or "").startswith(users):
            del sys.modules[name]
        else:
            _others[name] = module
    _newest = next(reversed(sys.modules))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {item.nodeid.partition("::")[0]: 0 for item in items}
    for file in places:
        places[file] = next((place for place, start in enumerate(_FIRST) if file.startswith(start)), len(_FIRST))
    items.sort(key=lambda item: places[item.nodeid.partition("::")[0]])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Give each process whole files, or single tests for those of _SPREAD."""
    from xdist.scheduler import LoadScopeScheduling

    scheduler = LoadScopeScheduling(config, log)
    scheduler._split_scope = lambda nodeid: nodeid if nodeid.startswith(_SPREAD) else nodeid.partition("::")[0]
    return scheduler


def pytest_collection_finish() -> None:
    """Cache what libraries recreate for each test, and exempt imported objects from garbage collection."""
    if client := sys.modules.get("httpx._transports.default"):  # each client reads all certificates
        client.create_ssl_context = functools.cache(client.create_ssl_context)  # type: ignore[attr-defined]
    if "export.conversion.to_onnx" in sys.modules:
        keep_operators()
    gc.freeze()
    gc.enable()


def keep_operators() -> None:
    """Cache torch's table of ONNX operators, whose creation takes half of the time of a small export."""
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    make = functools.cache(ONNXRegistry.from_torchlib)

    def copied(**options: int) -> ONNXRegistry:
        table = copy.copy(make(**options))
        table.functions = {operator: list(known) for operator, known in table.functions.items()}
        return table

    ONNXRegistry.from_torchlib = staticmethod(copied)  # type: ignore[method-assign,assignment]


# Typer would build the command line from all its functions at every call.
typer.main.get_command = functools.cache(typer.main.get_command)
