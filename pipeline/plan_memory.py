"""The memory that training will need, for `pipe plan`: a process of its own traces one step without filling memory.

An estimate that fits is kept beside the runs, by the keys of the steps. One that does not fit is made again, since free
memory changes.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.contract.config import Config
from pipeline.contract.settings.section import count_bytes
from pipeline.executors.local import LocalLauncher, count_gpus, training_environment
from pipeline.history import Project, find_run
from pipeline.plan import Decision, processes_per_node
from pipeline.system.files import digest_mapping, write_atomic
from pipeline.system.wording import size

CACHE_FILE = ".memory-estimates.json"  # in the folder of runs
_TIMEOUT_SECONDS = 120  # the user's data() may do anything
_UNITS = {"GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10, "bytes": 1}
_KINDS = ("weights", "gradients", "optimizer", "activations")


def plan_memory(
    project: Project, config: Config, steps: Sequence[Decision], server: Mapping[str, str]
) -> dict[str, Any]:
    """Return bytes in total and by kind, `limit` and perhaps `fix`; or the `reason` why they are unknown."""
    prepare, train = (next(step for step in steps if step.name == name) for name in ("prepare", "train"))
    request = _request(project, config, prepare)
    facts = {"prepare": prepare.key, "train": train.key}
    facts |= {name: str(request[name]) for name in ("device", "processes", "local_processes", "limit")}
    key, cache = digest_mapping(facts), project.runs / CACHE_FILE
    kept = _read_cache(cache)
    if key in kept:
        return dict(kept[key])
    estimate = _estimate(project.root, config, request, server)
    if project.runs.is_dir() and "reason" not in estimate and not _exceeds(estimate):
        with contextlib.suppress(OSError):  # a plan may be made where nothing can be written
            write_atomic(cache, json.dumps({**kept, key: estimate}, indent=1))
    return estimate


def describe_memory(estimate: Mapping[str, Any]) -> str:
    """Return the line of the plan."""
    unit = size(estimate["bytes"]).rpartition(" ")[2]
    kinds = ", ".join(f"{kind} {estimate[kind] / _UNITS[unit]:.1f}" for kind in _KINDS)
    text = f"memory: {size(estimate['bytes'])} per process ({kinds})"
    if not _exceeds(estimate):
        return text
    fix = estimate.get("fix")
    setting = f"{fix['setting']} needs {size(fix['bytes'])}" if fix else "lower train.batch_size, or use more memory"
    return f"{text}, but it can have only {size(estimate['limit'])}; to fix it: {setting}"


def _exceeds(estimate: Mapping[str, Any]) -> bool:
    return bool(0 < estimate["limit"] < estimate["bytes"])


def _request(project: Project, config: Config, prepare: Decision) -> dict[str, Any]:
    """Return what `train.device.memory` reads; of pods, only the requested memory is known."""
    train, on_cluster = config.train, config.cluster.executor == "kubernetes"
    gpus = int(train.device == "cuda") if on_cluster else count_gpus(os.environ)
    local_processes = processes_per_node(train, gpus)
    limit = (0 if gpus else count_bytes(config.cluster.memory) // local_processes) if on_cluster else None
    prepared = find_run(project.runs, prepare.source).output("prepare").resolve() if prepare.source else ""
    return {
        "config": config.model_dump(mode="json"),
        "device": "cpu" if on_cluster else train.device,
        "processes": local_processes * train.fewest_nodes,
        "local_processes": local_processes,
        "limit": limit,
        "prepared": str(prepared),
    }


def _estimate(root: Path, config: Config, request: Mapping[str, Any], server: Mapping[str, str]) -> dict[str, Any]:
    started = time.monotonic()

    def tick() -> None:
        if time.monotonic() > started + _TIMEOUT_SECONDS:
            raise TimeoutError

    with tempfile.TemporaryDirectory(prefix="pipe-") as folder:
        file, log = Path(folder) / "request.json", Path(folder) / "log"
        file.write_text(json.dumps(request))
        launcher, command = LocalLauncher(root, tick, forks=True), ("python", "-m", "train.device.memory", str(file))
        try:
            status = launcher.launch(command, log, {**training_environment(config.train, 0), **server})
        except TimeoutError:
            return {"reason": f"the data could not be opened within {_TIMEOUT_SECONDS} s"}
        if status:
            return {"reason": (log.read_text().strip().splitlines() or [f"exit status {status}"])[-1]}
        return dict(json.loads(file.read_text()))


def _read_cache(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError):  # absent, or damaged: estimates are made again
        return {}
