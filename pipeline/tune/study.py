"""A study shared by workers on several machines: each trial is claimed by one worker, and continued if that is killed.

Trials are stored in Optuna's journal, a file that all workers append to.
"""

from __future__ import annotations

import fcntl
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, TextIO, TypeAlias

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.pruners import BasePruner, MedianPruner, NopPruner, SuccessiveHalvingPruner
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from optuna.trial import FrozenTrial, TrialState

from pipeline.contract.settings.stages import Tune
from pipeline.history import FileLock, exclusive_lock, try_lock

State: TypeAlias = Literal["done", "pruned", "refused", "failed", "running", "unfinished"]
STARTUP_TRIALS = 5  # that must finish before the median pruner starts
WARMUP_EPOCHS = 1  # of a trial before it may be pruned
_SEED = 0
# The sampler treats pruned trials as bad ones and ignores failed ones.
_OPTUNA_STATES = {"pruned": TrialState.PRUNED, "refused": TrialState.PRUNED, "failed": TrialState.FAIL}


@dataclass(frozen=True)
class TrialResult:
    """The end of a trial; `caused_by_settings` is true if it failed because of its settings."""

    state: Literal["done", "pruned", "refused", "failed"]
    value: float | None = None
    reason: str = ""
    caused_by_settings: bool = False


@dataclass(frozen=True)
class Claim:
    """A trial that belongs to this worker as long as it holds the lock."""

    trial: optuna.Trial
    values: Mapping[str, Any]
    lock: FileLock

    @property
    def number(self) -> int:
        return self.trial.number


class Study:
    def __init__(self, folder: Path, tune: Tune, space: Mapping[str, BaseDistribution]) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._folder, self._tune, self._space = folder, tune, space
        self._storage = open_journal(folder / "journal.log")
        self._study = optuna.create_study(
            storage=self._storage,
            study_name=folder.name,
            direction=tune.direction,
            pruner=make_pruner(tune),
            load_if_exists=True,
        )

    @property
    def name(self) -> str:
        return self._folder.name

    @property
    def trials(self) -> list[FrozenTrial]:
        return self._study.get_trials(deepcopy=False)

    @property
    def finished(self) -> bool:
        trials = self.trials
        return len(trials) >= self._tune.trials and all(trial.state.is_finished() for trial in trials)

    def claim(self) -> Claim | None:
        """Claim an abandoned trial or start a new one; None if other workers have all remaining ones."""
        with exclusive_lock(self._folder / "claim.lock"):
            trials = self.trials
            for number in [trial.number for trial in trials if not trial.state.is_finished()]:
                if lock := self._lock_if_abandoned(number):
                    return self._make_claim(self._reopen(number), lock)
            if len(trials) >= self._tune.trials:
                return None
            lock = try_lock(self._lock(len(trials)))
            assert lock, "only this method starts trials"
            self._study.sampler = make_sampler(_SEED, len(trials))
            return self._make_claim(self._study.ask(), lock)

    def tell(self, claim: Claim, result: TrialResult) -> None:
        claim.trial.set_user_attr("state", result.state)
        claim.trial.set_user_attr("reason", result.reason)
        if result.state == "done":
            self._study.tell(claim.number, result.value)
        else:
            state = TrialState.PRUNED if result.caused_by_settings else _OPTUNA_STATES[result.state]
            self._study.tell(claim.number, state=state)
        claim.lock.release()
        self._lock(claim.number).unlink(missing_ok=True)

    def trial_state(self, trial: FrozenTrial) -> State:
        if trial.state.is_finished():
            state: State = trial.user_attrs["state"]
            return state
        if lock := self._lock_if_abandoned(trial.number):
            lock.release()
            return "unfinished"
        return "running"

    def ranked_trials(self) -> list[FrozenTrial]:
        """Return complete trials by value, best first, then the others in order."""
        sign = -1 if self._tune.direction == "maximize" else 1
        complete = [trial for trial in self.trials if trial.state == TrialState.COMPLETE]
        others = [trial for trial in self.trials if trial.state != TrialState.COMPLETE]
        return [*sorted(complete, key=lambda trial: sign * (trial.value or 0.0)), *others]

    def best(self) -> FrozenTrial | None:
        return next((trial for trial in self.ranked_trials() if trial.state == TrialState.COMPLETE), None)

    def _lock_if_abandoned(self, number: int) -> FileLock | None:
        """Return the lock of a trial without a worker, unless it has just been finished."""
        lock = try_lock(self._lock(number))
        if lock and self.trials[number].state.is_finished():
            lock.release()
            return None
        return lock

    def _make_claim(self, trial: optuna.Trial, lock: FileLock) -> Claim:
        return Claim(trial, {name: _suggest(trial, name, kind) for name, kind in self._space.items()}, lock)

    def _reopen(self, number: int) -> optuna.Trial:
        """Reopen an unfinished trial; settings that it lacks are sampled when it is claimed."""
        self._study.sampler = make_sampler(_SEED, number)
        study_id = self._storage.get_study_id_from_name(self.name)
        return optuna.Trial(self._study, self._storage.get_trial_id_from_study_id_trial_number(study_id, number))

    def _lock(self, number: int) -> Path:
        return self._folder / f"trial-{number}.lock"


def make_pruner(tune: Tune) -> BasePruner:
    """Return the pruner; its steps are epochs, counted from one."""
    if tune.pruner == "median":
        return MedianPruner(n_startup_trials=STARTUP_TRIALS, n_warmup_steps=WARMUP_EPOCHS)
    if tune.pruner == "halving":
        return SuccessiveHalvingPruner(min_resource=WARMUP_EPOCHS)
    return NopPruner()


def make_sampler(seed: int, number: int) -> optuna.samplers.BaseSampler:
    """Return a sampler with a seed per trial, so that workers differ and a resumed search samples the same values."""
    drawn = hashlib.sha256(f"{seed}/{number}".encode()).digest()[:4]
    return optuna.samplers.TPESampler(seed=int.from_bytes(drawn, "big"))


def _suggest(trial: optuna.Trial, name: str, kind: BaseDistribution) -> Any:
    if isinstance(kind, FloatDistribution):
        return trial.suggest_float(name, kind.low, kind.high, log=kind.log)
    if isinstance(kind, IntDistribution):
        return trial.suggest_int(name, kind.low, kind.high, log=kind.log)
    assert isinstance(kind, CategoricalDistribution)
    return trial.suggest_categorical(name, kind.choices)


def open_journal(path: Path) -> JournalStorage:
    return JournalStorage(JournalFileBackend(str(path), KernelLock(path)))


class KernelLock(JournalFileOpenLock):
    """A lock that the kernel releases when a process is killed; Optuna's own lock files block all others for 30 s.

    An incomplete line of a killed process is truncated first, as it would corrupt the next line.
    """

    def __init__(self, journal: Path) -> None:
        super().__init__(str(journal))
        self._journal = journal
        self._held: TextIO | None = None

    def acquire(self) -> bool:
        self._held = self._journal.with_suffix(".lock").open("a")
        fcntl.flock(self._held, fcntl.LOCK_EX)
        truncate_incomplete_line(self._journal)
        return True

    def release(self) -> None:
        if self._held is not None:
            self._held.close()
            self._held = None


def truncate_incomplete_line(path: Path) -> None:
    """Remove the last line of a file if it does not end with a newline."""
    with path.open("r+b") as file:
        size = place = file.seek(0, 2)
        while place and _byte(file, place - 1) != b"\n":
            place -= 1
        if place < size:
            file.truncate(place)


def _byte(file: BinaryIO, place: int) -> bytes:
    file.seek(place)
    return file.read(1)
