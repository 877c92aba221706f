"""Snapshots: every process's part in the memory of its own machine and of another one, two of them in turn.

A machine's memory file system: a folder there for each run, which outlives every process of it.

Which processes share a machine, and who keeps a copy of whose part on another one.

Files on their way between processes, in pieces that no buffer is too small for.

The newest snapshot of which all parts are left on some machine, brought to every machine.
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
from train.checkpoint.format import NAME, Damaged, Manifest, Written, decode
from train.checkpoint.load import Saved, problem_of
from train.checkpoint.sharding import Share, share_out
from train.checkpoint.storage import Deed, Folder
from train.checkpoint.store import Background
from train.process_group import Group
from train.state import Progress, State

KEPT = 2


class Mirrors:
    """A context around training, as the store of checkpoints is.

    A snapshot counts when one machine has its manifest; each machine writes that when all parts are where they belong.
    The place of the last but one is taken when all have the last: whoever dies, all parts of one of them are left.
    """

    def __init__(
        self, folder: Path, machine: str, identity: Mapping[str, Any], group: Group, timeout_seconds: int
    ) -> None:
        self.folder, self._identity, self._group = folder, dict(identity), group
        self.shelf, self.background = Shelf(folder), Background(group, timeout_seconds)
        self.neighbours = Neighbours(group.gather(machine), group.rank.rank)
        self.background.join()
        self._share: Share | None = None
        self._sizes: list[int] = []

    def begin(self, token: str, step: int) -> None:
        """Training goes on from `step`: what was made after it will be made again."""
        self.shelf.begin(token)
        if self.neighbours.leads:
            self.shelf.clean()
            self.shelf.forget_after(step)

    def save(self, state: State, before_commit: Deed | None) -> None:
        """All take part. Returns when the state is copied; the last one's failure is raised now, on all.

        `before_commit` is done by the first process when all parts are in place, before the snapshot counts.
        """
        self.background.wait()
        if self.background.any(self._share is None or not self._share.fits(state.tensors)):
            self._share_out(state)
        assert self._share is not None
        data = self._share.take(state.tensors)
        self.background.start(partial(self._write, state, data, before_commit or _nothing))

    def wait(self) -> None:
        """Until the last snapshot is complete."""
        self.background.wait()

    def remove(self) -> None:
        """Training is over: all take part."""
        self.background.wait()
        self._group.gather(None)
        if self.neighbours.leads:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _share_out(self, state: State) -> None:
        self._share = share_out(state.tensors, self.background.exchange)
        self._sizes = self._group.gather(self._share.bytes)
        here = self.neighbours.here
        kept = [rank for rank in range(self._group.size) if rank in here or self.neighbours.keeper(rank) in here]
        failure = _failure_of(lambda: check_room(self.folder, KEPT * sum(self._sizes[rank] for rank in kept)))
        for told in self._group.gather(failure):
            if told is not None:
                raise told

    def _write(self, state: State, data: memoryview, before_commit: Deed) -> None:
        """In the background, on every process."""
        step, rank = state.progress.step, self._group.rank.rank
        if self.neighbours.leads:
            self.shelf.forget_before(max(self.shelf.steps(), default=0))
        told: Written | PipelineError
        parts = swap(
            torch.frombuffer(data, dtype=torch.uint8),
            self.neighbours.keeper(rank),
            {ward: self._sizes[ward] for ward in self.neighbours.wards},
            self.background.exchange,
        )
        try:
            told = self.shelf.write(step, file_of(rank), data)
            for ward, part in parts.items():
                self.shelf.write(step, file_of(ward), part.numpy().data)
        except OSError as error:  # the others wait to be told
            told = StageError(f"cannot keep the snapshot of step {step} in {self.folder}: {error}")
        outcome = self.background.share(self._conclude(state, self.background.collect(told), before_commit))
        if isinstance(outcome, PipelineError):
            raise outcome
        if self.neighbours.leads:
            self.shelf.commit(step, outcome, _nothing)
        self.background.any(False)  # all have it

    def _conclude(self, state: State, told: list[Any], before: Deed) -> bytes | PipelineError:
        """The manifest, on the first process; or why there is none."""
        if not self._group.rank.first:
            return b""
        for one in told:
            if isinstance(one, PipelineError):
                return one
        failure = _failure_of(before)
        manifest = Manifest(state.progress, state.scaler, self._identity, self._group.size, tuple(told))
        return failure or manifest.encode()


def file_of(rank: int) -> str:
    return f"{rank}.safetensors"


def _nothing() -> None:
    """What is done before a snapshot that nobody else waits for."""


def _failure_of(work: Deed) -> PipelineError | None:
    try:
        work()
    except PipelineError as error:
        return error
    return None


MEMORY = Path("/dev/shm")  # noqa: S108
_RUN = "run.txt"  # whose folder it is


def open_memory(run: Run, memory: Path = MEMORY) -> Path:
    """This run's folder; those of runs that are over, or gone, are removed."""
    if not memory.is_dir():
        raise ConfigError(f"train.snapshot=memory: this machine has no {memory}; use snapshot=none")
    _forget_others(memory)
    folder = memory / f"{_prefix()}{digest_bytes(str(run.path).encode())[:12]}"
    folder.mkdir(mode=0o700, exist_ok=True)
    held = folder.lstat()
    if held.st_uid != os.getuid() or not stat.S_ISDIR(held.st_mode):
        raise ConfigError(f"{folder} belongs to somebody else; remove it, or use train.snapshot=none")
    (folder / _RUN).write_text(str(run.path))
    return folder


def check_room(folder: Path, needed_bytes: int) -> None:
    """What is there already is replaced, the newest apart; so it counts as free."""
    there = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    free = shutil.disk_usage(folder).free + there
    if free < needed_bytes:
        raise ConfigError(
            f"train.snapshot=memory needs {_mb(needed_bytes)} MB under {folder.parent} of {os.uname().nodename}, "
            f"{_mb(free)} MB are free; make it larger (in a container: a volume of medium Memory), or use snapshot=none"
        )


class Shelf(Folder):
    """Snapshots as checkpoints are kept; a part that another machine has is put into its place."""

    def fill(self, step: int, name: str, data: memoryview) -> None:
        place = self._of(step)
        place.mkdir(parents=True, exist_ok=True)
        aside = place / f".{name}"
        aside.write_bytes(data)
        aside.replace(place / name)

    def manifests(self) -> dict[int, bytes]:
        return {step: self.manifest(step) for step in self.steps() if (self._of(step) / NAME).is_file()}

    def forget_before(self, step: int) -> None:
        for found in self.steps():
            if found < step:
                self.remove(found)

    def forget_after(self, step: int) -> None:
        for found in self.steps():
            if found > step:
                self.remove(found)


def _forget_others(memory: Path) -> None:
    for folder in memory.glob(f"{_prefix()}*"):
        told = folder / _RUN
        if told.is_file() and _is_over(Run(Path(told.read_text()))):
            shutil.rmtree(folder, ignore_errors=True)


def _is_over(run: Run) -> bool:
    return not run.path.is_dir() or run.output("train").is_dir()


def _prefix() -> str:
    return f"pipe-{os.getuid()}-"


def _mb(count: int) -> int:
    return -(-count // 2**20)


class Neighbours:
    """`machines` has the name of every process's machine, by rank."""

    def __init__(self, machines: Sequence[str], rank: int) -> None:
        self._machines, self._rank = list(machines), rank
        self._order = list(dict.fromkeys(machines))

    @property
    def here(self) -> list[int]:
        """The processes of this machine."""
        return self._of(self._machines[self._rank])

    @property
    def leads(self) -> bool:
        """Whether this process does what is done once on its machine."""
        return self._rank == self.here[0]

    @property
    def leaders(self) -> list[int]:
        return [self._of(machine)[0] for machine in self._order]

    def keeper(self, rank: int) -> int | None:
        """A process of the next machine; where there is one machine alone its memory must do."""
        if len(self._order) == 1:
            return None
        machine = self._machines[rank]
        others = self._of(self._order[(self._order.index(machine) + 1) % len(self._order)])
        return others[self._of(machine).index(rank) % len(others)]

    @property
    def wards(self) -> list[int]:
        """Those whose part this process keeps beside its own."""
        return [rank for rank in range(len(self._machines)) if self.keeper(rank) == self._rank]

    def _of(self, machine: str) -> list[int]:
        return [rank for rank, name in enumerate(self._machines) if name == machine]


_PIECE_BYTES = 64 << 20


def swap(
    data: Tensor, keeper: int | None, wards: Mapping[int, int], group: dist.ProcessGroup | None
) -> dict[int, Tensor]:
    """This process's bytes go to its keeper, those of its wards come: `wards` says of how many bytes each."""
    sent = [] if keeper is None else [dist.isend(piece, keeper, group) for piece in _pieces(data)]
    found = {rank: torch.empty(count, dtype=torch.uint8) for rank, count in wards.items()}
    for rank, room in found.items():
        for piece in _pieces(room):
            dist.recv(piece, rank, group)
    for work in sent:
        assert work is not None
        work.wait()
    return found


def hand_out(data: Tensor | None, count: int, owner: int, group: dist.ProcessGroup | None) -> Tensor:
    """What `owner` has, on every process; all take part."""
    found = torch.empty(count, dtype=torch.uint8) if data is None else data
    if group is not None:
        for piece in _pieces(found):
            dist.broadcast(piece, owner, group)
    return found


def _pieces(data: Tensor) -> tuple[Tensor, ...]:
    return torch.split(data, _PIECE_BYTES)


def newest_snapshot(
    mirrors: Mirrors, identity: Mapping[str, Any], group: Group, usable: Callable[[Progress], bool]
) -> Saved | None:
    """All take part and find the same. `usable` is asked on the first process."""
    told = group.gather(mirrors.shelf.manifests() if mirrors.neighbours.leads else {})
    for raw in candidates(told, identity):
        manifest = decode(raw)
        if group.share(usable(manifest.progress) if group.rank.first else None) and _bring(mirrors, raw, group):
            return Saved(mirrors.shelf, manifest)
    return None


def candidates(told: Sequence[Mapping[int, bytes]], identity: Mapping[str, Any]) -> list[bytes]:
    """Manifests that some machine has, newest first; two attempts may have made the same step in different parts."""
    found: dict[bytes, Manifest] = {}
    for raw in (raw for machine in told for raw in machine.values()):
        try:
            found[raw] = decode(raw)
        except Damaged as error:
            print(f"warning: a snapshot is passed over: {error}", file=sys.stderr)
    alike = [raw for raw, manifest in found.items() if manifest.identity == identity]
    return sorted(alike, key=lambda raw: (-found[raw].progress.step, raw))


def senders(names: Sequence[str], holders: Mapping[int, set[str]]) -> dict[str, int] | None:
    """Who sends each file that some machine lacks: `holders` says what each machine has, by its leader.

    None where nobody has a file any more.
    """
    found: dict[str, int] = {}
    for name in names:
        having = [leader for leader, held in holders.items() if name in held]
        if not having:
            return None
        if len(having) < len(holders):
            found[name] = having[0]
    return found


def _bring(mirrors: Mirrors, raw: bytes, group: Group) -> bool:
    """Every machine gets the files it lacks; false where that cannot be."""
    manifest = decode(raw)
    names = [file.name for file in manifest.files]
    holders = _holders(mirrors, manifest, group)
    sent = senders(names, holders)
    if sent is None or not _room_for(mirrors, manifest, sent, group):
        return False
    for file in manifest.files:
        if file.name in sent:
            _send(mirrors, manifest.progress.step, file, sent[file.name], holders, group)
    if mirrors.neighbours.leads:
        mirrors.shelf.fill(manifest.progress.step, NAME, memoryview(raw))
    group.gather(None)  # nobody reads before all is there
    return True


def _holders(mirrors: Mirrors, manifest: Manifest, group: Group) -> dict[int, set[str]]:
    """By the leader of each machine the files it has whole; the processes of a machine share the work of looking."""
    neighbours, step = mirrors.neighbours, manifest.progress.step
    mine = manifest.files[neighbours.here.index(group.rank.rank) :: len(neighbours.here)]
    whole = {file.name for file in mine if not problem_of(mirrors.shelf, step, [file])}
    told: dict[int, set[str]] = {leader: set() for leader in neighbours.leaders}
    for leader, found in group.gather((neighbours.here[0], whole)):
        told[leader] |= found
    return told


def _room_for(mirrors: Mirrors, manifest: Manifest, sent: Mapping[str, int], group: Group) -> bool:
    """A machine that held its share alone may not have the memory for all of it."""
    needed = sum(file.bytes for file in manifest.files if file.name in sent)
    problem = ""
    try:
        check_room(mirrors.folder, needed)
    except PipelineError as error:
        problem = str(error)
    told = [text for text in group.gather(problem) if text]
    if told and group.rank.first:
        print(f"warning: a snapshot is passed over: {told[0]}", file=sys.stderr)
    return not told


def _send(
    mirrors: Mirrors, step: int, file: Written, owner: int, holders: Mapping[int, set[str]], group: Group
) -> None:
    data: Tensor | None = None
    if group.rank.rank == owner:
        data = torch.clone(mirrors.shelf.read(step, file.name))  # it is mapped, and may be replaced
    data = hand_out(data, file.bytes, owner, mirrors.background.exchange)
    if mirrors.neighbours.leads and file.name not in holders[group.rank.rank]:
        mirrors.shelf.fill(step, file.name, data.numpy().data)
