"""Snapshots in memory: every process's shard on its own machine and on another one, for the last two snapshots.

A run has a folder in each machine's memory file system, which outlives all of its processes. A shard is copied to the
next machine in blocks over the process group. After a restart, the newest snapshot of which every shard exists on
some machine is brought to every machine.
"""

from __future__ import annotations

import os
import shutil
import stat
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.contract.errors import ConfigError, PipelineError, StageError
from pipeline.contract.files import digest_bytes
from pipeline.contract.run import Run
from train.checkpoint.format import MANIFEST_NAME, DamagedCheckpoint, FileRecord, Manifest, decode_manifest
from train.checkpoint.load import SavedCheckpoint, find_damage
from train.checkpoint.sharding import CheckpointShard, plan_shard
from train.checkpoint.storage import Action, LocalStorage
from train.checkpoint.store import BackgroundJobs
from train.process_group import ProcessGroup
from train.state import Progress, State

SNAPSHOTS_KEPT = 2
MEMORY = Path("/dev/shm")  # noqa: S108
_RUN_FILE = "run.txt"  # in the folder of a run: the path of the run
MESSAGE_BYTES = 64 << 20


class MemorySnapshots:
    """Saves snapshots of the state during training, in the background.

    A snapshot is complete once a machine has its manifest, which each machine writes when all shards are in place. A
    snapshot is only replaced once all machines have a newer one: whichever process dies, one of them is complete.
    """

    def __init__(
        self, folder: Path, machine: str, identity: Mapping[str, Any], group: ProcessGroup, timeout_seconds: int
    ) -> None:
        self.folder, self._identity, self._group = folder, dict(identity), group
        self.storage, self.background = MemoryStorage(folder), BackgroundJobs(group, timeout_seconds)
        self.backups = BackupPlan(group.gather(machine), group.rank.rank)
        self.background.create_process_group()
        self._shard: CheckpointShard | None = None
        self._sizes: list[int] = []

    def begin(self, token: str, step: int) -> None:
        """Start an attempt at training from `step`; snapshots of later steps will be made again."""
        self.storage.begin(token)
        if self.backups.is_leader:
            self.storage.clean()
            self.storage.remove_after(step)

    def save(self, state: State, before_commit: Action | None) -> None:
        """Copy the state and write it in the background; collective. Raises the last snapshot's failure, on all.

        The first process calls `before_commit` when all shards are in place, before the snapshot is complete.
        """
        self.background.wait()
        if self.background.any(self._shard is None or not self._shard.fits(state.tensors)):
            self._plan(state)
        assert self._shard is not None
        data = self._shard.copy(state.tensors)
        self.background.start(partial(self._write, state, data, before_commit or _do_nothing))

    def wait(self) -> None:
        """Wait until the last snapshot is complete."""
        self.background.wait()

    def remove(self) -> None:
        """Remove all snapshots after training; collective."""
        self.background.wait()
        self._group.gather(None)
        if self.backups.is_leader:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _plan(self, state: State) -> None:
        self._shard = plan_shard(state.tensors, self.background.process_group)
        self._sizes = self._group.gather(self._shard.bytes)
        local_ranks = self.backups.local_ranks
        stored_ranks = [
            r for r in range(self._group.size) if r in local_ranks or self.backups.backup_rank(r) in local_ranks
        ]
        needed_bytes = SNAPSHOTS_KEPT * sum(self._sizes[rank] for rank in stored_ranks)
        for failure in self._group.gather(_catch(lambda: check_free_memory(self.folder, needed_bytes))):
            if failure is not None:
                raise failure

    def _write(self, state: State, data: memoryview, before_commit: Action) -> None:
        """Write a snapshot: the job that runs in the background on every process."""
        step, rank = state.progress.step, self._group.rank.rank
        if self.backups.is_leader:
            self.storage.remove_before(max(self.storage.steps(), default=0))
        copies = exchange_copies(
            torch.frombuffer(data, dtype=torch.uint8),
            self.backups.backup_rank(rank),
            {protected: self._sizes[protected] for protected in self.backups.protected_ranks},
            self.background.process_group,
        )
        record: FileRecord | PipelineError
        try:
            record = self.storage.write(step, shard_name(rank), data)
            for other_rank, shard in copies.items():
                self.storage.write(step, shard_name(other_rank), shard.numpy().data)
        except OSError as error:  # raised below, on all processes
            record = StageError(f"cannot write the snapshot of step {step} to {self.folder}: {error}")
        manifest = self.background.broadcast(
            self._make_manifest(state, self.background.gather_any(record), before_commit)
        )
        if isinstance(manifest, PipelineError):
            raise manifest
        if self.backups.is_leader:
            self.storage.commit(step, manifest, _do_nothing)
        self.background.any(False)  # a barrier: all machines have the snapshot

    def _make_manifest(self, state: State, records: list[Any], before_commit: Action) -> bytes | PipelineError:
        """Return the manifest on the first process, or the failure that prevents it."""
        if not self._group.rank.first:
            return b""
        for record in records:
            if isinstance(record, PipelineError):
                return record
        failure = _catch(before_commit)
        manifest = Manifest(state.progress, state.scaler, self._identity, self._group.size, tuple(records))
        return failure or manifest.encode()


def shard_name(rank: int) -> str:
    return f"{rank}.safetensors"


def _do_nothing() -> None:
    pass


def _catch(action: Action) -> PipelineError | None:
    try:
        action()
    except PipelineError as error:
        return error
    return None


class BackupPlan:
    """Which processes share a machine, and which process on another machine has the copy of each shard.

    `machines` has the machine's name of every process, by rank.
    """

    def __init__(self, machines: Sequence[str], rank: int) -> None:
        self._machines, self._rank = list(machines), rank
        self._order = list(dict.fromkeys(machines))

    @property
    def local_ranks(self) -> list[int]:
        """Return the ranks on this machine."""
        return self._ranks_on(self._machines[self._rank])

    @property
    def is_leader(self) -> bool:
        """Return whether this process does what is done once per machine."""
        return self._rank == self.local_ranks[0]

    @property
    def leader_ranks(self) -> list[int]:
        return [self._ranks_on(machine)[0] for machine in self._order]

    def backup_rank(self, rank: int) -> int | None:
        """Return the rank on the next machine that gets a copy; None if there is only one machine."""
        if len(self._order) == 1:
            return None
        host = self._machines[rank]
        backup_ranks = self._ranks_on(self._order[(self._order.index(host) + 1) % len(self._order)])
        return backup_ranks[self._ranks_on(host).index(rank) % len(backup_ranks)]

    @property
    def protected_ranks(self) -> list[int]:
        """Return the ranks of which this process has a copy, besides its own shard."""
        return [rank for rank in range(len(self._machines)) if self.backup_rank(rank) == self._rank]

    def _ranks_on(self, machine: str) -> list[int]:
        return [rank for rank, name in enumerate(self._machines) if name == machine]


def exchange_copies(
    data: Tensor, backup_rank: int | None, sizes: Mapping[int, int], group: dist.ProcessGroup | None
) -> dict[int, Tensor]:
    """Send this process's bytes to its backup; receive those of the ranks in `sizes`, which has their byte counts."""
    pending = [] if backup_rank is None else [dist.isend(block, backup_rank, group) for block in _blocks(data)]
    received = {rank: torch.empty(count, dtype=torch.uint8) for rank, count in sizes.items()}
    for rank, buffer in received.items():
        for block in _blocks(buffer):
            dist.recv(block, rank, group)
    for work in pending:
        assert work is not None
        work.wait()
    return received


def broadcast_bytes(data: Tensor | None, count: int, source: int, group: dist.ProcessGroup | None) -> Tensor:
    """Return the bytes of `source` on every process; collective."""
    buffer = torch.empty(count, dtype=torch.uint8) if data is None else data
    if group is not None:
        for block in _blocks(buffer):
            dist.broadcast(block, source, group)
    return buffer


def _blocks(data: Tensor) -> tuple[Tensor, ...]:
    return torch.split(data, MESSAGE_BYTES)


def open_snapshot_folder(run: Run, memory: Path = MEMORY) -> Path:
    """Return this run's folder; folders of finished or deleted runs are removed."""
    if not memory.is_dir():
        raise ConfigError(f"train.snapshot=memory: this machine has no {memory}; use snapshot=none")
    _remove_finished(memory)
    folder = memory / f"{_prefix()}{digest_bytes(str(run.path).encode())[:12]}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if status.st_uid != os.getuid() or not stat.S_ISDIR(status.st_mode):
        raise ConfigError(f"{folder} belongs to another user; remove it, or use train.snapshot=none")
    (folder / _RUN_FILE).write_text(str(run.path))
    return folder


def _remove_finished(memory: Path) -> None:
    for folder in memory.glob(f"{_prefix()}*"):
        run_file = folder / _RUN_FILE
        if run_file.is_file() and _is_finished(Run(Path(run_file.read_text()))):
            shutil.rmtree(folder, ignore_errors=True)


def _is_finished(run: Run) -> bool:
    return not run.path.is_dir() or run.output("train").is_dir()


def _prefix() -> str:
    return f"pipe-{os.getuid()}-"


def check_free_memory(folder: Path, needed_bytes: int) -> None:
    """Raise an error if there is too little memory; existing snapshots will be replaced, so they count as free."""
    existing = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    free = shutil.disk_usage(folder).free + existing
    if free < needed_bytes:
        raise ConfigError(
            f"train.snapshot=memory needs {_mb(needed_bytes)} MB under {folder.parent} of {os.uname().nodename}, "
            f"{_mb(free)} MB are free; make it larger (in a container: a volume of medium Memory), or use snapshot=none"
        )


def _mb(count: int) -> int:
    return -(-count // 2**20)


class MemoryStorage(LocalStorage):
    """Snapshots, stored like checkpoints; files from other machines can be added."""

    def add(self, step: int, name: str, data: memoryview) -> None:
        folder = self._step_folder(step)
        folder.mkdir(parents=True, exist_ok=True)
        temporary = folder / f".{name}"
        temporary.write_bytes(data)
        temporary.replace(folder / name)

    def manifests(self) -> dict[int, bytes]:
        return {
            step: self.manifest(step) for step in self.steps() if (self._step_folder(step) / MANIFEST_NAME).is_file()
        }

    def remove_before(self, limit: int) -> None:
        for step in self.steps():
            if step < limit:
                self.remove(step)

    def remove_after(self, limit: int) -> None:
        for step in self.steps():
            if step > limit:
                self.remove(step)


def find_newest_snapshot(
    snapshots: MemorySnapshots, identity: Mapping[str, Any], group: ProcessGroup, usable: Callable[[Progress], bool]
) -> SavedCheckpoint | None:
    """Return the newest usable snapshot, the same on all processes; collective. Only the first calls `usable`."""
    manifests = group.gather(snapshots.storage.manifests() if snapshots.backups.is_leader else {})
    for raw in sorted_candidates(manifests, identity):
        manifest = decode_manifest(raw)
        is_usable = group.share(usable(manifest.progress) if group.rank.first else None)
        if is_usable and _complete_everywhere(snapshots, raw, group):
            return SavedCheckpoint(snapshots.storage, manifest)
    return None


def sorted_candidates(manifests: Sequence[Mapping[int, bytes]], identity: Mapping[str, Any]) -> list[bytes]:
    """Return the distinct manifests of this run, newest first; two attempts may have sharded one step differently."""
    decoded: dict[bytes, Manifest] = {}
    for raw in (raw for by_step in manifests for raw in by_step.values()):
        try:
            decoded[raw] = decode_manifest(raw)
        except DamagedCheckpoint as error:
            print(f"warning: a snapshot is skipped: {error}", file=sys.stderr)
    of_this_run = [raw for raw, manifest in decoded.items() if manifest.identity == identity]
    return sorted(of_this_run, key=lambda raw: (-decoded[raw].progress.step, raw))


def choose_senders(names: Sequence[str], files_by_leader: Mapping[int, set[str]]) -> dict[str, int] | None:
    """Return which leader sends each file that some machine lacks; None if no machine has one of the files."""
    senders: dict[str, int] = {}
    for name in names:
        leaders = [leader for leader, files in files_by_leader.items() if name in files]
        if not leaders:
            return None
        if len(leaders) < len(files_by_leader):
            senders[name] = leaders[0]
    return senders


def _complete_everywhere(snapshots: MemorySnapshots, raw: bytes, group: ProcessGroup) -> bool:
    """Send every machine the files it lacks; return False if that is impossible."""
    manifest = decode_manifest(raw)
    files_by_leader = _intact_files(snapshots, manifest, group)
    senders = choose_senders([file.name for file in manifest.files], files_by_leader)
    if senders is None or not _has_memory_for(snapshots, manifest, senders, group):
        return False
    for file in manifest.files:
        if file.name in senders:
            _send(snapshots, manifest.progress.step, file, senders[file.name], files_by_leader, group)
    if snapshots.backups.is_leader:
        snapshots.storage.add(manifest.progress.step, MANIFEST_NAME, memoryview(raw))
    group.gather(None)  # a barrier: files are read only after all are in place
    return True


def _intact_files(snapshots: MemorySnapshots, manifest: Manifest, group: ProcessGroup) -> dict[int, set[str]]:
    """Return the intact files of each machine by its leader's rank; processes of a machine divide the checking."""
    backups, step = snapshots.backups, manifest.progress.step
    own_files = manifest.files[backups.local_ranks.index(group.rank.rank) :: len(backups.local_ranks)]
    intact = {file.name for file in own_files if not find_damage(snapshots.storage, step, [file])}
    files: dict[int, set[str]] = {leader: set() for leader in backups.leader_ranks}
    for leader, names in group.gather((backups.local_ranks[0], intact)):
        files[leader] |= names
    return files


def _has_memory_for(
    snapshots: MemorySnapshots, manifest: Manifest, senders: Mapping[str, int], group: ProcessGroup
) -> bool:
    """Return whether every machine has memory for all files; until now it may have had a few of them only."""
    needed_bytes = sum(file.bytes for file in manifest.files if file.name in senders)
    failure = _catch(lambda: check_free_memory(snapshots.folder, needed_bytes))
    failures = [text for text in group.gather(str(failure) if failure else "") if text]
    if failures and group.rank.first:
        print(f"warning: a snapshot is skipped: {failures[0]}", file=sys.stderr)
    return not failures


def _send(
    snapshots: MemorySnapshots,
    step: int,
    file: FileRecord,
    source: int,
    files_by_leader: Mapping[int, set[str]],
    group: ProcessGroup,
) -> None:
    data: Tensor | None = None
    if group.rank.rank == source:
        data = torch.clone(snapshots.storage.read(step, file.name))  # it is memory-mapped, and may be replaced
    data = broadcast_bytes(data, file.bytes, source, snapshots.background.process_group)
    if snapshots.backups.is_leader and file.name not in files_by_leader[group.rank.rank]:
        snapshots.storage.add(step, file.name, data.numpy().data)
