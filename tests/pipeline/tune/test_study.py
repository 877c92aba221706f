from __future__ import annotations

import fcntl
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import optuna
import pytest
from optuna.pruners import MedianPruner, NopPruner, SuccessiveHalvingPruner
from optuna.trial import TrialState

from pipeline.system.sources import SOURCE_ROOT
from pipeline.tune.record import Direction
from pipeline.tune.search import (
    Claim,
    KernelLock,
    Study,
    TrialResult,
    make_pruner,
    open_journal,
    truncate_incomplete_line,
)

from .conftest import MakeConfig, open_study

LOCK_HOLDER = """
import sys, time
from pathlib import Path
from pipeline.tune.search import KernelLock
KernelLock(Path(sys.argv[1])).acquire()
print("held", flush=True)
time.sleep(60)
"""


def new_study(path: Path) -> optuna.Study:
    return optuna.create_study(storage=open_journal(path), study_name="one", load_if_exists=True)


@pytest.mark.parametrize(
    ("before", "after"),
    [(b"", b""), (b"one\n", b"one\n"), (b"one\ntw", b"one\n"), (b"on", b""), (b"one\n\n", b"one\n\n")],
)
def test_only_an_incomplete_line_is_truncated(tmp_path: Path, before: bytes, after: bytes) -> None:
    (tmp_path / "file").write_bytes(before)
    truncate_incomplete_line(tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == after


def test_half_written_line_of_a_killed_writer_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "journal.log"
    study = new_study(path)
    study.tell(study.ask().number, 1.0)
    with path.open("ab") as file:
        file.write(b'{"op_code":4,"worker')
    again = new_study(path)
    again.tell(again.ask().number, 2.0)
    assert [trial.value for trial in new_study(path).trials] == [1.0, 2.0]


def test_lock_of_a_killed_process_is_free_at_once(tmp_path: Path) -> None:
    path = tmp_path / "journal.log"
    study = new_study(path)
    command = [sys.executable, "-c", LOCK_HOLDER, str(path)]
    with subprocess.Popen(command, cwd=SOURCE_ROOT, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        holder.kill()
    with path.with_suffix(".lock").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # Optuna's own lock would be held for 30 s
    study.ask()


def test_lock_can_be_taken_again(tmp_path: Path) -> None:
    (tmp_path / "journal.log").touch()
    lock = KernelLock(tmp_path / "journal.log")
    for _ in range(2):
        assert lock.acquire()
        lock.release()


# Another worker, which is killed during a trial.
WORKER = """
import os, sys
from pathlib import Path
from pipeline.contract.config import parse_config
from pipeline.tune.search import search_space
from pipeline.tune.search import Study
config = parse_config(eval(sys.argv[2]), "test")
claim = Study(Path(sys.argv[1]), config.tune, search_space(config)).claim()
claim.trial.report(0.5, 1)
os.kill(os.getpid(), 9)
"""


def claimed(study: Study) -> Claim:
    claim = study.claim()
    assert claim is not None
    return claim


def run_all(study: Study) -> list[dict[str, float]]:
    """Finish all remaining trials with the learning rate as their value."""
    found = []
    while claim := study.claim():
        found.append(dict(claim.values))
        study.record_result(claim, TrialResult("done", claim.values["train.lr"]))
    return found


def kill_a_worker(folder: Path, make_config: MakeConfig) -> None:
    values = make_config(trials=3).model_dump(mode="json")
    done = subprocess.run(
        [sys.executable, "-c", WORKER, str(folder), repr(values)], cwd=SOURCE_ROOT, timeout=300, check=False
    )
    assert done.returncode == -9


def test_study_makes_the_configured_number_of_trials_which_can_be_raised_later(
    study: Study, tmp_path: Path, make_config: MakeConfig
) -> None:
    before = study.finished
    assert len(run_all(study)) == 3
    assert (before, study.finished) == (False, True)
    assert len(run_all(open_study(tmp_path / "abc", make_config(trials=5)))) == 2


def test_parallel_workers_make_each_trial_once(tmp_path: Path, make_config: MakeConfig) -> None:
    studies = [open_study(tmp_path / "abc", make_config(trials=12)) for _ in range(3)]
    with ThreadPoolExecutor(3) as pool:
        found = [values for made in pool.map(run_all, studies) for values in made]
    assert len(found) == 12
    assert len({values["train.lr"] for values in found}) == 12
    assert studies[0].finished


def test_running_trial_cannot_be_claimed(study: Study, tmp_path: Path, make_config: MakeConfig) -> None:
    first = claimed(study)
    other = open_study(tmp_path / "abc", make_config(trials=1))
    assert other.claim() is None
    assert not other.finished
    assert [other.trial_state(trial) for trial in other.trials] == ["running"]
    study.record_result(first, TrialResult("done", 1.0))
    assert other.finished


def test_trial_of_a_killed_worker_continues_with_its_settings(
    study: Study, tmp_path: Path, make_config: MakeConfig
) -> None:
    kill_a_worker(tmp_path / "abc", make_config)
    assert [study.trial_state(trial) for trial in study.trials] == ["unfinished"]
    drawn = study.trials[0].params
    claim = claimed(study)
    assert (claim.number, claim.values) == (0, drawn)
    assert study.trials[0].intermediate_values == {1: 0.5}
    study.record_result(claim, TrialResult("done", 1.0))
    run_all(study)
    assert [trial.number for trial in study.trials] == [0, 1, 2]


def test_interrupted_search_samples_the_same_values(tmp_path: Path, make_config: MakeConfig) -> None:
    config = make_config(trials=14)  # more than the sampler draws by chance alone
    whole = run_all(open_study(tmp_path / "whole", config))
    study = open_study(tmp_path / "broken", config)
    for _ in range(12):
        claim = claimed(study)
        study.record_result(claim, TrialResult("done", claim.values["train.lr"]))
    claimed(study).lock.release()  # as a killed worker's is
    run_all(open_study(tmp_path / "broken", config))
    assert [trial.params for trial in study.trials] == whole


def test_results_are_reported_to_the_sampler(tmp_path: Path, make_config: MakeConfig) -> None:
    study = open_study(tmp_path / "abc", make_config(trials=5))
    endings = [
        TrialResult("done", 0.5),
        TrialResult("pruned", reason="after epoch 1"),
        TrialResult("refused", reason="no"),
        TrialResult("failed", reason="diverged", caused_by_settings=True),
        TrialResult("failed", reason="a bug"),
    ]
    for ending in endings:
        study.record_result(claimed(study), ending)
    states = [TrialState.COMPLETE, TrialState.PRUNED, TrialState.PRUNED, TrialState.PRUNED, TrialState.FAIL]
    assert [trial.state for trial in study.trials] == states
    assert [study.trial_state(trial) for trial in study.trials] == [ending.state for ending in endings]
    assert list((tmp_path / "abc").glob("trial-*")) == []


@pytest.mark.parametrize(("direction", "order"), [("maximize", [1, 0, 2]), ("minimize", [0, 1, 2])])
def test_best_trial_comes_first_and_those_without_value_last(
    tmp_path: Path, make_config: MakeConfig, direction: Direction, order: list[int]
) -> None:
    open_study(tmp_path / "abc", make_config(trials=3), direction)
    study = open_study(tmp_path / "abc", make_config(trials=3))  # as a worker opens it
    assert study.best() is None
    for ending in (TrialResult("done", 0.0), TrialResult("done", 2.0), TrialResult("pruned")):
        study.record_result(claimed(study), ending)
    assert [trial.number for trial in study.ranked_trials()] == order
    best = study.best()
    assert best is not None and best.number == order[0]


def test_pruner_is_chosen_by_name(make_config: MakeConfig) -> None:
    kinds = {"median": MedianPruner, "halving": SuccessiveHalvingPruner, "none": NopPruner}
    for word, kind in kinds.items():
        assert isinstance(make_pruner(make_config(pruner=word).tune), kind)


def test_median_pruner_waits_for_trials_and_epochs(
    tmp_path: Path, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.tune.search.STARTUP_TRIALS", 1)
    monkeypatch.setattr("pipeline.tune.search.WARMUP_EPOCHS", 2)
    study = open_study(tmp_path / "abc", make_config(trials=2))
    good = claimed(study)
    for epoch in (1, 2):
        good.trial.report(0.9, epoch)
        assert not good.trial.should_prune(), "there is no other trial"
    study.record_result(good, TrialResult("done", 0.9))
    bad = claimed(study)
    bad.trial.report(0.1, 1)
    assert not bad.trial.should_prune(), "its warm-up"
    bad.trial.report(0.1, 2)
    assert bad.trial.should_prune()
    study.record_result(bad, TrialResult("pruned"))
