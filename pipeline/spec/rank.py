"""Where one process stands among those that train or evaluate together."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from pipeline.spec.digest import digest_parts


@dataclass(frozen=True)
class Rank:
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_size: int = 0  # how many of them are on this machine; 0: the launcher does not tell
    job: str = ""  # equal in all processes of one launch and in no other launch, where the launcher tells
    master: str = ""  # `host:port` where they meet, where the launcher or the user tells

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> Rank:
        """As the launcher sets it; a process started alone is rank 0 of 1."""
        env = os.environ if env is None else env
        master = f"{env['MASTER_ADDR']}:{env['MASTER_PORT']}" if env.keys() >= {"MASTER_ADDR", "MASTER_PORT"} else ""
        for words in _LAUNCHERS:
            if words.rank in env and words.size in env:
                local_size = env.get(words.local_size, "")
                job = [env[name] for name in words.job if name in env]
                return cls(
                    rank=int(env[words.rank]),
                    local_rank=int(env.get(words.local_rank, "0")),
                    world_size=int(env[words.size]),
                    local_size=int(local_size) if local_size.isdecimal() else 0,
                    job=digest_parts(job)[:12] if job else "",
                    master=master,
                )
        return cls()

    @property
    def first(self) -> bool:
        return self.rank == 0

    @property
    def all_local(self) -> bool:
        return self.local_size == self.world_size

    def slice_of(self, count: int) -> range:
        """This rank's contiguous share of `count` items; shares differ by one at most, together they are all."""
        return range(count * self.rank // self.world_size, count * (self.rank + 1) // self.world_size)


class _Words(NamedTuple):
    """The variables of one launcher."""

    rank: str
    size: str
    local_rank: str
    local_size: str
    job: tuple[str, ...] = ()


# The nearest launcher counts: torchrun and horovodrun are themselves started by the others on a cluster.
_LAUNCHERS = (
    _Words("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", ("TORCHELASTIC_RUN_ID",)),
    _Words("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"),
    _Words(  # Open MPI; its job number may come again, with mpirun's own address it does not
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        ("PMIX_NAMESPACE", "OMPI_MCA_orte_hnp_uri"),
    ),
    _Words("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),  # MPICH and its kin
    # srun alone sets the size of the step: the script of an sbatch is no process of a group, though it has a
    # number. Tasks per node are `2` on one machine, `2(x3)` on several.
    _Words(
        "SLURM_PROCID",
        "SLURM_STEP_NUM_TASKS",
        "SLURM_LOCALID",
        "SLURM_STEP_TASKS_PER_NODE",
        ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
    ),
)
