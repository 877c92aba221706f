from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from pipeline.system.errors import ConfigError
from pipeline.system.processes import (
    PARENT_WATCH_VARIABLE,
    TERMINATED,
    Rank,
    deferred_signals,
    describe_exit,
    hide_packages,
    split_address,
    was_terminated,
)


def test_an_address_is_a_host_and_a_port() -> None:
    assert split_address("head:29500") == ("head", 29500)
    assert split_address("[::1]:29500") == ("::1", 29500)


@pytest.mark.parametrize("address", ["", "head", "head:", ":29500", "head:x"])
def test_malformed_address_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="write it as host:port"):
        split_address(address)


@pytest.mark.parametrize(
    ("status", "output"),
    [
        (-9, "rank 1 was killed (SIGKILL)"),
        (-11, "rank 1 was ended by SIGSEGV"),
        (-99, "rank 1 was ended by signal 99"),
        (3, "rank 1 exited with status 3"),
    ],
)
def test_exit_statuses_are_described(status: int, output: str) -> None:
    assert describe_exit("rank 1", status) == output


def test_termination_is_distinguished_from_a_kill() -> None:
    assert [was_terminated(status) for status in (-15, 143, -9, 1)] == [True, True, False, False]


def test_hidden_packages_cannot_be_imported_unless_already_loaded() -> None:
    sys.modules.pop("colorsys", None)
    with hide_packages("colorsys"):
        with pytest.raises(ImportError):
            import colorsys
        assert "colorsys" in sys.modules
    import colorsys

    assert sys.modules["colorsys"] is colorsys
    with hide_packages("colorsys"):
        import colorsys as found
    assert found is colorsys


def test_manifest_validator_is_never_imported() -> None:
    """Tests have it installed, and it takes a second to import."""
    program = "from k8s.cluster.api import import_client; import_client(); import sys; "
    program += "print('kubernetes' in sys.modules, 'kubernetes_validate' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.split() == ["True", "False"], done.stderr


# Reports when it watches its parent, then works until it is stopped through another pipe.
PROGRAM = (
    "import os, sys; from pipeline.system.processes import watch_parent; watch_parent({arguments}); "
    "{work}; print('held', flush=True); os.read({stop}, 1)"
)
PRINT_INPUT = "import os, select; print(select.select([0], [], [], 0)[0] and os.read(0, 1), flush=True)"


@contextmanager
def watched_process(
    env: dict[str, str], work: str = "pass", arguments: str = ""
) -> Iterator[tuple[subprocess.Popen[bytes], int, int]]:
    """Yield a process, the runner's end of its standard input, and the pipe that ends its work."""
    read_end, write_end = os.pipe()
    stop_read, stop_write = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(stop=stop_read, work=work, arguments=arguments)],
        stdin=read_end,
        stdout=subprocess.PIPE,
        pass_fds=[stop_read],
        env={**{k: v for k, v in os.environ.items() if k != PARENT_WATCH_VARIABLE}, **env},
    )
    os.close(read_end)
    os.close(stop_read)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == (b"held\n" if work == "pass" else b"b''\n")
        yield process, write_end, stop_write
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        os.close(stop_write)


def test_process_ends_when_its_parent_is_gone() -> None:
    with watched_process({PARENT_WATCH_VARIABLE: "1"}) as (process, write_end, _):
        assert process.poll() is None
        os.close(write_end)
        assert process.wait(timeout=300) == TERMINATED


WATCHING_CHILD = PROGRAM.format(arguments="", work=PRINT_INPUT, stop=0)


@pytest.mark.parametrize(
    ("work", "arguments"),
    [
        (PRINT_INPUT, ""),
        (f"import subprocess; subprocess.run([sys.executable, '-c', {PRINT_INPUT!r}])", ""),
        (f"import subprocess; subprocess.run([sys.executable, '-c', {WATCHING_CHILD!r}])", "passes_on=True"),
    ],
)
def test_standard_input_is_empty_while_the_parent_is_watched(work: str, arguments: str) -> None:
    """In the process, in one that it starts, and in one that watches the same parent."""
    with watched_process({PARENT_WATCH_VARIABLE: "1"}, work, arguments) as (process, write_end, _):
        assert process.poll() is None
        os.close(write_end)
        assert process.wait(timeout=300) == TERMINATED


def test_bytes_on_the_parent_watch_do_not_end_the_process() -> None:
    with watched_process({PARENT_WATCH_VARIABLE: "1"}) as (process, write_end, stop):
        os.write(write_end, b"hello")
        os.write(stop, b"x")
        assert process.wait(timeout=300) == 0
        os.close(write_end)


def test_null_device_as_standard_input_is_not_watched() -> None:
    """Its end-of-file has nothing to do with the runner: mpirun passes standard input to its first process only."""
    env = {**os.environ, PARENT_WATCH_VARIABLE: "1"}
    program = (
        "import threading; from pipeline.system.processes import watch_parent; "
        "watch_parent(); print(threading.active_count())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, stdin=subprocess.DEVNULL, capture_output=True, timeout=300, check=True
    )
    assert done.stdout == b"1\n"


def test_process_without_the_variable_is_not_watched() -> None:
    with watched_process({}) as (process, write_end, stop):
        os.close(write_end)
        os.write(stop, b"x")
        assert process.wait(timeout=300) == 0


@pytest.mark.parametrize("world_size", [1, 2, 3, 7, 8])
@pytest.mark.parametrize("count", [0, 1, 2, 5, 8, 97])
def test_slices_cover_every_item_and_differ_by_one_at_most(world_size: int, count: int) -> None:
    slices = [Rank(rank, rank, world_size).slice_of(count) for rank in range(world_size)]
    assert [i for part in slices for i in part] == list(range(count))
    assert max(map(len, slices)) - min(map(len, slices)) <= 1


@pytest.mark.parametrize(
    "env", [{}, {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0"}]
)
def test_process_without_a_launcher_is_rank_0_of_1(env: dict[str, str]) -> None:
    assert Rank.from_env(env) == Rank(0, 0, 1)
    assert Rank.from_env(env).first


TORCHRUN = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
OPEN_MPI = {f"OMPI_COMM_WORLD_{name}": TORCHRUN[name] for name in ("RANK", "LOCAL_RANK")}
OPEN_MPI |= {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SRUN = {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "1"}
HOROVOD = {"HOROVOD_RANK": "3", "HOROVOD_SIZE": "4", "HOROVOD_LOCAL_RANK": "1", "HOROVOD_LOCAL_SIZE": "2"}


@pytest.mark.parametrize("env", [TORCHRUN, OPEN_MPI, MPICH, SRUN, HOROVOD], ids=lambda env: next(iter(env)))
def test_rank_is_read_from_launcher_variables_torchruns_first(env: dict[str, str]) -> None:
    found = Rank.from_env(env)
    assert (found.rank, found.local_rank, found.world_size) == (3, 1, 4)
    assert not found.first
    assert Rank.from_env({**env, "RANK": "5", "WORLD_SIZE": "8"}).rank == 5, "whichever launcher started torchrun"


@pytest.mark.parametrize(
    ("per_node", "size", "local"), [("4", "4", True), ("2(x2)", "4", False), ("3,1", "4", False), ("2", "4", False)]
)
def test_slurm_shows_whether_all_processes_are_on_this_machine(per_node: str, size: str, local: bool) -> None:
    env = {**SRUN, "SLURM_STEP_NUM_TASKS": size, "SLURM_STEP_TASKS_PER_NODE": per_node}
    assert Rank.from_env(env).all_local is local


def test_all_processes_of_a_launch_have_the_same_job_id() -> None:
    first = {**SRUN, "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}
    assert Rank.from_env(first).job == Rank.from_env({**first, "SLURM_PROCID": "1"}).job != ""
    for later in ({"SLURM_STEP_ID": "1"}, {"SLURM_JOB_ID": "8"}, {"SLURM_RESTART_COUNT": "1"}):
        assert Rank.from_env({**first, **later}).job != Rank.from_env(first).job
    assert Rank.from_env(MPICH).job == "", "MPICH has no id"


def test_master_needs_both_address_and_port() -> None:
    assert Rank.from_env({**SRUN, "MASTER_ADDR": "head", "MASTER_PORT": "29500"}).master == "head:29500"
    assert Rank.from_env({**SRUN, "MASTER_ADDR": "head"}).master == ""


def test_a_signal_waits_until_the_started_process_is_known() -> None:
    handler = signal.getsignal(signal.SIGINT)
    with deferred_signals() as deliver:
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            deliver()
    assert signal.getsignal(signal.SIGINT) is handler
