"""Launch commands of training: our agent, mpirun, srun and horovodrun, from the settings of `train`."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from pipeline.contract.restarts import meeting_seconds
from pipeline.contract.settings.stages import Train
from pipeline.executors.local import DEFAULTS_OF_STEPS
from pipeline.system.errors import ConfigError
from pipeline.system.processes import PARENT_WATCH_VARIABLE

POD_NUMBER = "JOB_COMPLETION_INDEX"  # variable of an Indexed Job; the first pod leads
# Variables that mpirun must pass on explicitly to processes on other machines.
PASSED_ON = ("PYTHONSAFEPATH", "PYTHONUNBUFFERED", "OMP_NUM_THREADS", *DEFAULTS_OF_STEPS, PARENT_WATCH_VARIABLE)
_HOW_TO_INSTALL = {
    "mpirun": "install Open MPI (`apt-get install openmpi-bin`)",
    "srun": "start `pipe` where Slurm is installed",
}


@dataclass(frozen=True)
class Rendezvous:
    """The store where the machines of one run meet."""

    address: str  # host:port
    id: str


def uses_agent(train: Train) -> bool:
    return train.launcher == "torchrun" and train.strategy != "horovod"


def launch_command(
    train: Train,
    per_node: int,
    python: tuple[str, ...],
    rendezvous: Rendezvous | None = None,
    own_address: str = "",
    log: Path | None = None,
) -> tuple[str, ...]:
    """Return the command that starts `python`, which is `python -m train RUN`, in every training process."""
    if train.strategy == "horovod":
        return horovodrun(per_node, python, train.trace)
    if train.launcher == "mpirun":
        return mpirun(per_node, python, train.most_nodes)
    if train.launcher == "srun":
        return srun(per_node, python, train.most_nodes)
    # Our agent, which replaces torchrun; it is started once on each machine.
    options: tuple[str, ...] = (f"--processes={per_node}", f"--restarts={train.restarts}")
    if log is not None:
        options += (f"--log={log}",)
    if rendezvous is not None:
        options += (
            f"--min-nodes={train.fewest_nodes}",
            f"--max-nodes={train.most_nodes}",
            f"--timeout={meeting_seconds(train.timeout_seconds)}",
        )
        options += (f"--rendezvous={rendezvous.address}", f"--id={rendezvous.id}", f"--address={own_address}")
    interpreter, _, _, *run = python
    return (interpreter, "-m", "train.elastic.agent", *options, *run)


def mpirun(per_node: int, python: tuple[str, ...], nodes: int = 1) -> tuple[str, ...]:
    """Return the command of Open MPI, started once; it takes the machines from a batch system or its host file.

    Processes may share cores and are not bound to any: OMP_NUM_THREADS sets how many each uses.
    """
    environment = [argument for name in PASSED_ON for argument in ("-x", name)]
    mapping = ["--map-by", f"ppr:{per_node}:node"] if nodes > 1 else []
    count = ("-np", str(per_node * nodes))
    return ("mpirun", *count, "--oversubscribe", "--bind-to", "none", *mapping, *environment, *python)


def srun(per_node: int, python: tuple[str, ...], nodes: int = 1) -> tuple[str, ...]:
    """Return the command of Slurm, started once; it passes the environment on, and one failure ends all processes."""
    tasks = (f"--nodes={nodes}", f"--ntasks={per_node * nodes}", f"--ntasks-per-node={per_node}")
    return ("srun", *tasks, "--kill-on-bad-exit=1", *python)


def horovodrun(processes: int, python: tuple[str, ...], trace: bool = False) -> tuple[str, ...]:
    """Return the command of Horovod on this machine; with `train.trace` it also writes its own timeline."""
    timeline = ("--timeline-filename", f"{python[-1]}/train.partial/horovod.json") if trace else ()
    return ("python", "-m", "horovod.runner.launch", "--gloo", "-np", str(processes), *timeline, *python)


def launcher_environment(train: Train, user: int) -> Mapping[str, str]:
    """Let Open MPI run as root, the usual user in containers, which it otherwise refuses."""
    if train.launcher == "mpirun" and user == 0:
        return {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return {}


def check_launcher(train: Train) -> None:
    """Raise ConfigError unless the launcher is installed."""
    if train.strategy == "horovod" and find_spec("horovod") is None:
        raise ConfigError(
            "train.strategy=horovod, but the library is not installed; to fix it, build it as docs/training.md "
            "describes, or use train.strategy=ddp"
        )
    if train.launcher in _HOW_TO_INSTALL and shutil.which(train.launcher) is None:
        raise ConfigError(
            f"train.launcher={train.launcher}, but there is no {train.launcher} on PATH; to fix it, "
            f"{_HOW_TO_INSTALL[train.launcher]}, or use train.launcher=torchrun"
        )
