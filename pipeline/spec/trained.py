"""The run of another project whose trained weights are begun with: the newest that its own gate let pass."""

from __future__ import annotations

import json
from pathlib import Path

from pipeline.spec.errors import ConfigError, DataError
from pipeline.spec.pretrained import SINGLE
from pipeline.spec.run import Run
from pipeline.spec.runs import all_runs

_PASSED = ("pass", "no-baseline")  # every rule held; `forced` is somebody's word, and such a run is named by itself


def is_project(folder: Path) -> bool:
    return (folder / "pipe.yaml").is_file()


def run_of(project: Path, word: str, taken: str = "") -> Run:
    """The run that prepare has taken, while it is there, and else the newest that is good.

    Whether another run has the very weights that prepare has seen, their digests tell.
    """
    runs = project / "runs"
    if taken and (runs / taken / "run.json").is_file():
        return Run(runs / taken)
    states = {run: _lacks(run) for run in all_runs(runs)}
    good = next((run for run, lacks in states.items() if not lacks), None)
    if good is None:
        raise ConfigError(f"model.pretrained={word}: {_told(states)}; first `cd {word} && pipe run all`")
    return good


def check_trained(run: Run, digest: str) -> None:
    """The weights are those that training has left and the gate has seen."""
    record = run.read().steps.get("train")
    if record is not None and record.outputs.get(SINGLE) != digest:
        raise DataError(
            f"{run.output('train') / SINGLE}: changed since it was trained; `pipe verify {run.id}` there says more"
        )


def _lacks(run: Run) -> str:
    """What keeps a run from being begun with; empty where nothing does."""
    steps = run.read().steps
    for name in ("prepare", "train", "evaluate"):
        status = steps[name].status if name in steps else "never run"
        if status != "done":
            return f"{name} {status}"
    try:
        verdict = run.verdict()["verdict"]
    except (OSError, json.JSONDecodeError, KeyError) as error:
        raise DataError(f"{run.output('evaluate') / 'verdict.json'}: damaged or gone ({error})") from error
    return "" if verdict in _PASSED else f"verdict {verdict}"


def _told(states: dict[Run, str]) -> str:
    if not states:
        return "a project without runs, so there are no weights to begin with"
    newest, lacks = next(iter(states.items()))
    return f"none of its {len(states)} runs is trained and passed its gate (the newest, {newest.id}: {lacks})"
