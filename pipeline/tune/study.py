"""One study: who tries what next, so that all workers together make `tune.trials` trials, each of them once.

Optuna's journal of a study: one file that several workers, on several machines, append to.
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
from pipeline.history import FileLock, try_lock, exclusive_lock

State: TypeAlias = Literal["done", "pruned", "refused", "failed", "running", "unfinished"]
STARTUP_TRIALS = 5  # that finish before the median prunes any
WARMUP_EPOCHS = 1  # that a trial trains before it may be pruned
_SEED = 0
# A pruned trial is a bad one to the sampler; of a failed one it learns nothing.
_TOLD = {"pruned": TrialState.PRUNED, "refused": TrialState.PRUNED, "failed": TrialState.FAIL}


@dataclass(frozen=True)
class Ending:
    """How a trial ended; `blamed` says that its own settings were at fault."""

    state: Literal["done", "pruned", "refused", "failed"]
    value: float | None = None
    reason: str = ""
    blamed: bool = False


@dataclass(frozen=True)
class Claim:
    """A trial that is this worker's, as long as the lock is held."""

    trial: optuna.Trial
    values: Mapping[str, Any]
    held: FileLock

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
        """A trial whose worker is gone, or else a further one; None when the others work on all that are left."""
        with exclusive_lock(self._folder / "claim.lock"):
            trials = self.trials
            for number in [trial.number for trial in trials if not trial.state.is_finished()]:
                if held := self._abandoned(number):
                    return self._claimed(self._reopened(number), held)
            if len(trials) >= self._tune.trials:
                return None
            held = try_lock(self._lock(len(trials)))
            assert held, "numbers are given out here alone"
            self._study.sampler = sampler_of(_SEED, len(trials))
            return self._claimed(self._study.ask(), held)

    def tell(self, claim: Claim, ending: Ending) -> None:
        claim.trial.set_user_attr("state", ending.state)
        claim.trial.set_user_attr("reason", ending.reason)
        if ending.state == "done":
            self._study.tell(claim.number, ending.value)
        else:
            state = TrialState.PRUNED if ending.blamed else _TOLD[ending.state]
            self._study.tell(claim.number, state=state)
        claim.held.release()
        self._lock(claim.number).unlink(missing_ok=True)

    def state_of(self, trial: FrozenTrial) -> State:
        if trial.state.is_finished():
            state: State = trial.user_attrs["state"]
            return state
        if held := self._abandoned(trial.number):
            held.release()
            return "unfinished"
        return "running"

    def best_first(self) -> list[FrozenTrial]:
        """Complete trials by value, then the others as they came."""
        sign = -1 if self._tune.direction == "maximize" else 1
        complete = [trial for trial in self.trials if trial.state == TrialState.COMPLETE]
        others = [trial for trial in self.trials if trial.state != TrialState.COMPLETE]
        return [*sorted(complete, key=lambda trial: sign * (trial.value or 0.0)), *others]

    def best(self) -> FrozenTrial | None:
        return next((trial for trial in self.best_first() if trial.state == TrialState.COMPLETE), None)

    def _abandoned(self, number: int) -> FileLock | None:
        """The lock of a trial that nobody works on; its worker may have told it and gone a moment ago."""
        held = try_lock(self._lock(number))
        if held and self.trials[number].state.is_finished():
            held.release()
            return None
        return held

    def _claimed(self, trial: optuna.Trial, held: FileLock) -> Claim:
        return Claim(trial, {name: _suggest(trial, name, kind) for name, kind in self._space.items()}, held)

    def _reopened(self, number: int) -> optuna.Trial:
        """As it was left; what it lacks of its settings is drawn when it is claimed."""
        self._study.sampler = sampler_of(_SEED, number)
        study_id = self._storage.get_study_id_from_name(self.name)
        return optuna.Trial(self._study, self._storage.get_trial_id_from_study_id_trial_number(study_id, number))

    def _lock(self, number: int) -> Path:
        return self._folder / f"trial-{number}.lock"


def make_pruner(tune: Tune) -> BasePruner:
    """Steps are epochs, counted from one."""
    if tune.pruner == "median":
        return MedianPruner(n_startup_trials=STARTUP_TRIALS, n_warmup_steps=WARMUP_EPOCHS)
    if tune.pruner == "halving":
        return SuccessiveHalvingPruner(min_resource=WARMUP_EPOCHS)
    return NopPruner()


def sampler_of(seed: int, number: int) -> optuna.samplers.BaseSampler:
    """A new one for each trial: workers never draw the same, and a search that was stopped draws what it would have."""
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
    """Held by the kernel: Optuna's own locks are files, and one that a killed process left stops everybody for 30 s.

    A process killed while it wrote leaves half a line, which would spoil the next one: it is cut off first.
    """

    def __init__(self, journal: Path) -> None:
        super().__init__(str(journal))
        self._journal = journal
        self._held: TextIO | None = None

    def acquire(self) -> bool:
        self._held = self._journal.with_suffix(".lock").open("a")
        fcntl.flock(self._held, fcntl.LOCK_EX)
        cut_half_line(self._journal)
        return True

    def release(self) -> None:
        if self._held is not None:
            self._held.close()
            self._held = None


def cut_half_line(path: Path) -> None:
    """Of a file whose last line has no end, that line."""
    with path.open("r+b") as file:
        size = place = file.seek(0, 2)
        while place and _byte(file, place - 1) != b"\n":
            place -= 1
        if place < size:
            file.truncate(place)


def _byte(file: BinaryIO, place: int) -> bytes:
    file.seek(place)
    return file.read(1)
