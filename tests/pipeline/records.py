"""Records of runs and of a live service, in the form in which they are stored."""

from __future__ import annotations

from typing import Any

from pipeline.contract.run import Run, RunFile
from pipeline.service.process import LiveService
from pipeline.system.files import write_atomic


def write_run_file(run: Run, wanted: str, **config: Any) -> Run:
    """Write a run.json for this step, with this configuration."""
    values = {"name": "x", "task": "task.py:T", "codec": "codec.py:C", **config}
    file = RunFile(id=run.id, created="2026-01-01T00:00:00+00:00", wanted=(wanted,), config=values, environment={})
    run.path.mkdir(parents=True, exist_ok=True)
    write_atomic(run.path / "run.json", file.model_dump_json())
    return run


def live_service(**changes: Any) -> LiveService:
    """Return the record of a live service, whose process does not exist unless changed."""
    values = {
        "name": "tiny", "run": "one", "bundle": "a" * 64, "pid": 2**22, "process_started": 0.0, "host": "127.0.0.1",
        "port": 9000, "grpc_port": 9001, "health_port": 9002, "requested_port": 9000, "since": "now", "log": "log",
    }  # fmt: skip
    return LiveService.model_validate({**values, **changes})
