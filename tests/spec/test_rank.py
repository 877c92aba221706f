from __future__ import annotations

import pytest

from pipeline.spec.rank import Rank


@pytest.mark.parametrize("world_size", [1, 2, 3, 7, 8])
@pytest.mark.parametrize("count", [0, 1, 2, 5, 8, 97])
def test_slices_cover_every_item_once_in_order_and_differ_by_one_at_most(world_size: int, count: int) -> None:
    slices = [Rank(rank, rank, world_size).slice_of(count) for rank in range(world_size)]
    assert [i for part in slices for i in part] == list(range(count))
    assert max(map(len, slices)) - min(map(len, slices)) <= 1


def test_a_process_started_alone_is_the_first_of_one() -> None:
    assert Rank.from_env({}) == Rank(0, 0, 1)
    assert Rank.from_env({}).first


TORCHRUN = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SRUN = {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "1"}
HOROVOD = {"HOROVOD_RANK": "3", "HOROVOD_SIZE": "4", "HOROVOD_LOCAL_RANK": "1", "HOROVOD_LOCAL_SIZE": "2"}


@pytest.mark.parametrize("env", [TORCHRUN, OPEN_MPI, MPICH, SRUN, HOROVOD], ids=lambda env: next(iter(env)))
def test_each_launcher_tells_the_place(env: dict[str, str]) -> None:
    found = Rank.from_env(env)
    assert (found.rank, found.local_rank, found.world_size) == (3, 1, 4)
    assert not found.first


@pytest.mark.parametrize("outer", [OPEN_MPI, MPICH, SRUN], ids=lambda env: next(iter(env)))
def test_torchrun_counts_before_the_launcher_that_started_it(outer: dict[str, str]) -> None:
    assert Rank.from_env({**outer, "RANK": "5", "WORLD_SIZE": "8"}).rank == 5


def test_the_script_of_an_sbatch_is_alone_though_its_job_has_tasks() -> None:
    script = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0"}
    assert Rank.from_env(script) == Rank()


@pytest.mark.parametrize(
    ("per_node", "size", "local"), [("4", "4", True), ("2(x2)", "4", False), ("3,1", "4", False), ("2", "4", False)]
)
def test_slurm_tells_whether_all_processes_are_on_this_machine(per_node: str, size: str, local: bool) -> None:
    env = {**SRUN, "SLURM_STEP_NUM_TASKS": size, "SLURM_STEP_TASKS_PER_NODE": per_node}
    assert Rank.from_env(env).all_local is local


def test_a_launch_has_a_name_of_its_own_which_all_its_processes_share() -> None:
    first = {**SRUN, "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}
    assert Rank.from_env(first).job == Rank.from_env({**first, "SLURM_PROCID": "1"}).job != ""
    for later in ({"SLURM_STEP_ID": "1"}, {"SLURM_JOB_ID": "8"}, {"SLURM_RESTART_COUNT": "1"}):
        assert Rank.from_env({**first, **later}).job != Rank.from_env(first).job
    assert Rank.from_env(MPICH).job == "", "MPICH does not tell"


def test_the_meeting_place_is_known_when_both_halves_are() -> None:
    assert Rank.from_env({**SRUN, "MASTER_ADDR": "head", "MASTER_PORT": "29500"}).master == "head:29500"
    assert Rank.from_env({**SRUN, "MASTER_ADDR": "head"}).master == ""
