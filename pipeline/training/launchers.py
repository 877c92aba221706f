"""What starts the processes of a step: the words of each launcher, as a pure function of the train section."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec

from pipeline.contract.errors import ConfigError
from pipeline.contract.processes import PARENT_WATCH_VARIABLE
from pipeline.contract.settings.stages import Train

# What a process needs of our environment where the launcher does not hand all of it on to other machines.
PASSED_ON = (
    "PYTHONSAFEPATH", "PYTHONUNBUFFERED", "OMP_NUM_THREADS", "CUBLAS_WORKSPACE_CONFIG", "TOKENIZERS_PARALLELISM",
    PARENT_WATCH_VARIABLE,
)  # fmt: skip
_MENDS = {
    "mpirun": "install Open MPI (`apt-get install openmpi-bin`)",
    "srun": "start `pipe` where Slurm is installed",
}


@dataclass(frozen=True)
class Meeting:
    """Where the machines of one run meet, and by which name."""

    address: str  # host:port
    id: str


def launched(
    train: Train, per_node: int, python: tuple[str, ...], meeting: Meeting | None = None, own_address: str = ""
) -> tuple[str, ...]:
    """The command that starts `python`, which is `python -m train RUN`, in every process of training."""
    if train.backend == "horovod":
        return horovodrun(per_node, python, train.trace)
    if train.launcher == "mpirun":
        return mpirun(per_node, python, train.most_nodes)
    if train.launcher == "srun":
        return srun(per_node, python, train.most_nodes)
    return agent(train, per_node, python, meeting, own_address)


def agent(
    train: Train, per_node: int, python: tuple[str, ...], meeting: Meeting | None, own_address: str
) -> tuple[str, ...]:
    """Torchrun's part, started once on each machine."""
    words: tuple[str, ...] = (f"--processes={per_node}", f"--restarts={train.restarts}")
    if meeting is not None:
        words += (f"--fewest={train.fewest_nodes}", f"--most={train.most_nodes}", f"--timeout={train.timeout_seconds}")
        words += (f"--meeting={meeting.address}", f"--id={meeting.id}", f"--address={own_address}")
    interpreter, _, _, *run = python
    return (interpreter, "-m", "train.elastic.agent", *words, *run)


def torchrun(processes: int, python: tuple[str, ...]) -> tuple[str, ...]:
    """On one machine."""
    interpreter, *module = python
    alone = ("--standalone", "--nnodes=1", f"--nproc-per-node={processes}")
    return (interpreter, "-m", "torch.distributed.run", *alone, *module)


def mpirun(per_node: int, python: tuple[str, ...], nodes: int = 1) -> tuple[str, ...]:
    """Open MPI's words. Started once; it knows the machines from a batch system or from its own host file.

    A core may be shared, and no process is tied to one: OMP_NUM_THREADS says how many each uses.
    """
    environment = [word for name in PASSED_ON for word in ("-x", name)]
    spread = ["--map-by", f"ppr:{per_node}:node"] if nodes > 1 else []
    count = ("-np", str(per_node * nodes))
    return ("mpirun", *count, "--oversubscribe", "--bind-to", "none", *spread, *environment, *python)


def srun(per_node: int, python: tuple[str, ...], nodes: int = 1) -> tuple[str, ...]:
    """Started once; the environment goes along, and one process that fails ends the others."""
    tasks = (f"--nodes={nodes}", f"--ntasks={per_node * nodes}", f"--ntasks-per-node={per_node}")
    return ("srun", *tasks, "--kill-on-bad-exit=1", *python)


def horovodrun(processes: int, python: tuple[str, ...], trace: bool = False) -> tuple[str, ...]:
    """On this machine; with a timeline it writes Horovod's own beside ours."""
    timeline = ("--timeline-filename", f"{python[-1]}/train.partial/horovod.json") if trace else ()
    return ("python", "-m", "horovod.runner.launch", "--gloo", "-np", str(processes), *timeline, *python)


def launcher_environment(train: Train, user: int) -> Mapping[str, str]:
    """Open MPI refuses to work for root, which in a container is who everybody is, unless told twice."""
    if train.launcher == "mpirun" and user == 0:
        return {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return {}


def check_launcher(train: Train) -> None:
    """Before anything starts: the launcher is installed."""
    if train.backend == "horovod" and find_spec("horovod") is None:
        raise ConfigError(
            "train.backend=horovod, but the library is not installed; docs/training.md says how to build it, "
            "or use train.backend=torch"
        )
    if train.launcher in _MENDS and shutil.which(train.launcher) is None:
        raise ConfigError(
            f"train.launcher={train.launcher}, but there is no {train.launcher} on PATH; {_MENDS[train.launcher]}, "
            "or use train.launcher=torchrun"
        )
