from __future__ import annotations

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import optuna
import pytest
from optuna.pruners import MedianPruner, NopPruner, SuccessiveHalvingPruner
from optuna.trial import TrialState

from pipeline.contract.sources import SOURCE_ROOT
from pipeline.tune.study import Claim, Ending, KernelLock, Study, cut_half_line, make_pruner, open_journal

from .conftest import MakeConfig, open_study

HOLDER = """
import sys, time
from pathlib import Path
from pipeline.tune.study import KernelLock
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
def test_only_a_line_without_an_end_is_cut_off(tmp_path: Path, before: bytes, after: bytes) -> None:
    (tmp_path / "file").write_bytes(before)
    cut_half_line(tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == after


def test_half_a_line_of_a_killed_writer_costs_that_line_alone(tmp_path: Path) -> None:
    path = tmp_path / "journal.log"
    study = new_study(path)
    study.tell(study.ask().number, 1.0)
    with path.open("ab") as file:
        file.write(b'{"op_code":4,"worker')
    again = new_study(path)
    again.tell(again.ask().number, 2.0)
    assert [trial.value for trial in new_study(path).trials] == [1.0, 2.0]


def test_the_lock_of_a_killed_process_is_free_at_once(tmp_path: Path) -> None:
    path = tmp_path / "journal.log"
    study = new_study(path)
    command = [sys.executable, "-c", HOLDER, str(path)]
    with subprocess.Popen(command, cwd=SOURCE_ROOT, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        holder.kill()
    started = time.monotonic()
    study.ask()
    assert time.monotonic() - started < 10, "Optuna's own locks are waited for 30 s"


def test_a_lock_can_be_taken_again(tmp_path: Path) -> None:
    (tmp_path / "journal.log").touch()
    lock = KernelLock(tmp_path / "journal.log")
    for _ in range(2):
        assert lock.acquire()
        lock.release()


# Another worker, which draws its settings and is killed at its work.
WORKER = """
import os, sys
from pathlib import Path
from pipeline.contract.config import parse_config
from pipeline.tune.search import distributions
from pipeline.tune.study import Study
config = parse_config(eval(sys.argv[2]), "test")
claim = Study(Path(sys.argv[1]), config.tune, distributions(config)).claim()
claim.trial.report(0.5, 1)
os.kill(os.getpid(), 9)
"""


def claimed(study: Study) -> Claim:
    claim = study.claim()
    assert claim is not None
    return claim


def walk(study: Study) -> list[dict[str, float]]:
    """All trials that are left, each as good as its learning rate is large."""
    found = []
    while claim := study.claim():
        found.append(dict(claim.values))
        study.tell(claim, Ending("done", claim.values["train.lr"]))
    return found


def kill_a_worker(folder: Path, make_config: MakeConfig) -> None:
    values = make_config(trials=3).model_dump(mode="json")
    done = subprocess.run([sys.executable, "-c", WORKER, str(folder), repr(values)], cwd=SOURCE_ROOT, timeout=60, check=False)
    assert done.returncode == -9


def test_as_many_trials_are_made_as_are_wanted(study: Study) -> None:
    assert not study.finished
    assert len(walk(study)) == 3
    assert study.finished


def test_more_can_be_requested_of_a_study_later(study: Study, tmp_path: Path, make_config: MakeConfig) -> None:
    walk(study)
    assert len(walk(open_study(tmp_path / "abc", make_config(trials=5)))) == 2


def test_workers_at_once_make_each_trial_once_and_draw_different_settings(
    tmp_path: Path, make_config: MakeConfig
) -> None:
    studies = [open_study(tmp_path / "abc", make_config(trials=12)) for _ in range(3)]
    with ThreadPoolExecutor(3) as pool:
        found = [values for walked in pool.map(walk, studies) for values in walked]
    assert len(found) == 12
    assert len({values["train.lr"] for values in found}) == 12
    assert studies[0].finished


def test_a_trial_under_way_is_no_one_elses(study: Study, tmp_path: Path, make_config: MakeConfig) -> None:
    first = claimed(study)
    other = open_study(tmp_path / "abc", make_config(trials=1))
    assert other.claim() is None
    assert not other.finished
    assert [other.state_of(trial) for trial in other.trials] == ["running"]
    study.tell(first, Ending("done", 1.0))
    assert other.finished


def test_the_trial_of_a_killed_worker_is_gone_on_with_under_the_same_settings(
    study: Study, tmp_path: Path, make_config: MakeConfig
) -> None:
    kill_a_worker(tmp_path / "abc", make_config)
    assert [study.state_of(trial) for trial in study.trials] == ["unfinished"]
    drawn = study.trials[0].params
    claim = claimed(study)
    assert (claim.number, claim.values) == (0, drawn)
    assert study.trials[0].intermediate_values == {1: 0.5}
    study.tell(claim, Ending("done", 1.0))
    walk(study)
    assert [trial.number for trial in study.trials] == [0, 1, 2]


def test_a_search_that_was_killed_draws_what_it_would_have_drawn(tmp_path: Path, make_config: MakeConfig) -> None:
    config = make_config(trials=14)  # more than the sampler draws by chance alone
    whole = walk(open_study(tmp_path / "whole", config))
    study = open_study(tmp_path / "broken", config)
    for _ in range(12):
        claim = claimed(study)
        study.tell(claim, Ending("done", claim.values["train.lr"]))
    claimed(study).held.release()  # as a killed worker's is
    walk(open_study(tmp_path / "broken", config))
    assert [trial.params for trial in study.trials] == whole


def test_an_ending_is_reported_to_the_sampler_as_what_it_means(tmp_path: Path, make_config: MakeConfig) -> None:
    study = open_study(tmp_path / "abc", make_config(trials=5))
    endings = [
        Ending("done", 0.5),
        Ending("pruned", reason="after epoch 1"),
        Ending("refused", reason="no"),
        Ending("failed", reason="diverged", blamed=True),
        Ending("failed", reason="a bug"),
    ]
    for ending in endings:
        study.tell(claimed(study), ending)
    told = [TrialState.COMPLETE, TrialState.PRUNED, TrialState.PRUNED, TrialState.PRUNED, TrialState.FAIL]
    assert [trial.state for trial in study.trials] == told
    assert [study.state_of(trial) for trial in study.trials] == [ending.state for ending in endings]
    assert list((tmp_path / "abc").glob("trial-*")) == []


@pytest.mark.parametrize(("metric", "order"), [("accuracy", [1, 0, 2]), ("loss", [0, 1, 2])])
def test_the_best_comes_first_and_what_has_no_value_last(
    tmp_path: Path, make_config: MakeConfig, metric: str, order: list[int]
) -> None:
    study = open_study(tmp_path / "abc", make_config(trials=3, metric=metric))
    assert study.best() is None
    for ending in (Ending("done", 0.0), Ending("done", 2.0), Ending("pruned")):
        study.tell(claimed(study), ending)
    assert [trial.number for trial in study.best_first()] == order
    best = study.best()
    assert best is not None and best.number == order[0]


def test_pruners_by_their_words(make_config: MakeConfig) -> None:
    kinds = {"median": MedianPruner, "halving": SuccessiveHalvingPruner, "none": NopPruner}
    for word, kind in kinds.items():
        assert isinstance(make_pruner(make_config(pruner=word).tune), kind)


def test_the_median_prunes_after_its_first_trials_and_epochs(
    tmp_path: Path, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.tune.study.STARTUP_TRIALS", 1)
    monkeypatch.setattr("pipeline.tune.study.WARMUP_EPOCHS", 2)
    study = open_study(tmp_path / "abc", make_config(trials=2))
    good = claimed(study)
    for epoch in (1, 2):
        good.trial.report(0.9, epoch)
        assert not good.trial.should_prune(), "nobody to compare it with"
    study.tell(good, Ending("done", 0.9))
    bad = claimed(study)
    bad.trial.report(0.1, 1)
    assert not bad.trial.should_prune(), "its warm-up"
    bad.trial.report(0.1, 2)
    assert bad.trial.should_prune()
    study.tell(bad, Ending("pruned"))
