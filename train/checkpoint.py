"""Checkpoints: complete and verified, or absent. Written aside, synced, renamed; a damaged one is passed over."""

from __future__ import annotations

import errno
import json
import shutil
import socket
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file

from pipeline.spec.digest import digest_file
from pipeline.spec.errors import ResourceError, StageError
from pipeline.spec.files import sync_directory, sync_tree, write_json
from pipeline.spec.weights import save_weights
from train.state import Progress, State, below, flatten, unflatten

__all__ = ["CheckpointStore", "Progress", "State"]


class CheckpointStore:
    """A directory of `step-00000100/{state.safetensors, meta.json}`."""

    def __init__(self, directory: Path, keep: int, identity: Mapping[str, Any]) -> None:
        self._directory = directory
        self._keep = keep
        self._identity = dict(identity)  # what the order of samples depends on: it must not change under a checkpoint

    def save(self, state: State) -> None:
        step = state.progress.step
        aside = self._directory / f".step-{step:08d}"
        try:
            self._write(state, aside)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(aside, ignore_errors=True)
            if getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error):
                raise ResourceError(self._disk_full(step)) from error
            raise
        self._prune(state.progress)

    def newest(self) -> State | None:
        """The newest checkpoint that is whole, with its best one whole too."""
        for step in reversed(self.steps()):
            try:
                state = self.load(step)
                if state.progress.best_step not in (0, step):
                    self.load(state.progress.best_step)
            except StageError as error:
                print(f"warning: {error}; skipped", file=sys.stderr)
            else:
                return state
        return None

    def load(self, step: int) -> State:
        directory = self._path(step)
        try:
            meta = json.loads((directory / "meta.json").read_text())
            if digest_file(directory / "state.safetensors") != meta["sha256"]:
                raise StageError(f"checkpoint {directory.name} is damaged: its digest does not match")
            tensors = load_file(directory / "state.safetensors")
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise StageError(f"checkpoint {directory.name} is damaged: {error}") from error
        if meta["identity"] != self._identity:
            raise StageError(f"checkpoint {directory.name} belongs to other data or another batch order")
        return State(
            progress=Progress(**meta["progress"]),
            weights=below("weights.", tensors),
            optimizer=unflatten(below("optimizer.", tensors), meta["param_groups"]),
            scaler=meta["scaler"],
            own=below("own.", tensors),
            world_size=meta["world_size"],
        )

    def steps(self) -> list[int]:
        return sorted(int(path.name[5:]) for path in self._directory.glob("step-*"))

    def _write(self, state: State, aside: Path) -> None:
        shutil.rmtree(aside, ignore_errors=True)  # left by a crash
        aside.mkdir(parents=True)
        tensors = {f"weights.{name}": tensor for name, tensor in state.weights.items()}
        tensors |= {f"optimizer.{name}": tensor for name, tensor in flatten(state.optimizer).items()}
        tensors |= {f"own.{name}": tensor for name, tensor in state.own.items()}
        save_weights(tensors, aside / "state.safetensors")
        meta = {
            "progress": asdict(state.progress),
            "scaler": dict(state.scaler),
            "param_groups": state.optimizer["param_groups"],
            "identity": self._identity,
            "world_size": state.world_size,
            "sha256": digest_file(aside / "state.safetensors"),
        }
        write_json(aside / "meta.json", meta)
        sync_tree(aside)
        target = self._path(state.progress.step)
        shutil.rmtree(target, ignore_errors=True)  # a damaged one that was passed over
        aside.rename(target)
        sync_directory(self._directory)

    def _prune(self, progress: Progress) -> None:
        """Keep the newest few, and the best each of them refers to.

        Later steps than the one just saved were passed over at the start; they must not count as the newest.
        """
        past = [step for step in self.steps() if step <= progress.step]
        kept = {*past[-self._keep :], progress.best_step}
        for step in sorted(kept):
            meta = self._path(step) / "meta.json"
            if meta.exists():
                kept.add(json.loads(meta.read_text())["progress"]["best_step"])
        for step in set(past) - kept:
            shutil.rmtree(self._path(step))

    def _path(self, step: int) -> Path:
        return self._directory / f"step-{step:08d}"

    def _disk_full(self, step: int) -> str:
        kept = f"the last good one is step {self.steps()[-1]}" if self.steps() else "there is no earlier one"
        return (
            f"disk full on {socket.gethostname()} while writing the checkpoint of step {step}; {kept}. "
            "Free some space, then `pipe run --resume`"
        )  # fmt: skip
