"""Training under a real Slurm: its daemons run in a folder of the test, with one node, which is this machine."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from pipeline.system.sources import SOURCE_ROOT

from ..ports import free_port
from .project_folder import ProjectFolder, environment, wait_for

NEEDED = ("munged", "slurmctld", "slurmd", "srun", "sinfo", "sbatch", "scancel", "scontrol")
BATCH = SOURCE_ROOT / "examples/slurm/train.sbatch"
needs_slurm = pytest.mark.skipif(
    os.geteuid() != 0 or any(shutil.which(name) is None for name in NEEDED),
    reason="no Slurm, or not root: apt-get install slurm-wlm munge",
)
CONFIGURATION = """\
ClusterName=one
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
CredType=cred/munge
SlurmctldPort={controller}
SlurmdPort={daemon}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
NodeName={host} NodeAddr=127.0.0.1 CPUs={cores} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP
"""


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Return the environment in which srun finds the daemons."""
    host, munge = socket.gethostname().partition(".")[0], tmp_path / "munge"
    for name in ("munge", "state", "spool"):
        (tmp_path / name).mkdir(mode=0o700)
    (munge / "key").write_bytes(os.urandom(1024))
    (munge / "key").chmod(0o600)
    configuration = tmp_path / "slurm.conf"
    ports = {"controller": free_port(), "daemon": free_port()}
    configuration.write_text(CONFIGURATION.format(host=host, folder=tmp_path, cores=os.cpu_count(), **ports))
    files = {"socket": "socket", "key-file": "key", "log-file": "log", "pid-file": "pid", "seed-file": "seed"}
    environment = {"SLURM_CONF": str(configuration)}
    with ExitStack() as daemons:
        for command in (
            ("munged", "--foreground", "--force", *(f"--{name}={munge}/{file}" for name, file in files.items())),
            ("slurmctld", "-D", "-f", str(configuration)),
            ("slurmd", "-D", "-N", host, "-f", str(configuration)),
        ):
            log = daemons.enter_context((tmp_path / f"{command[0]}.log").open("wb"))
            process = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | environment)
            daemons.callback(process.wait, 60)
            daemons.callback(process.terminate)
            if command[0] == "munged":
                wait_for((munge / "socket").exists)
        wait_for(lambda: "idle" in _call("sinfo", "--noheader", "--format=%T", **environment))
        yield environment


def _call(*command: str, **environment: str) -> str:
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)
    return done.stdout


@pytest.mark.long
@needs_slurm
def test_srun_trains_the_weights_of_torchrun(
    finished: ProjectFolder, copied: ProjectFolder, slurm: dict[str, str]
) -> None:
    copied.pipe("run", "train", "--force", "train", "train.launcher=srun", env=slurm)
    assert copied.weights == finished.weights
    run = copied.latest
    assert run.config.train.launcher == "srun"
    done = copied.pipe("verify", run.id)
    assert "1 attempt, 2 processes" in done.stdout


@pytest.mark.long
@needs_slurm
def test_batch_job_that_was_interrupted_goes_on(copied: ProjectFolder, slurm: dict[str, str]) -> None:
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    env = {**environment(slurm), "PATH": path}
    steps = ("train", "--force", "train", "train.epochs=400")
    options = ("--parsable", f"--chdir={copied.folder}", f"--output={copied.folder}/job.log", "--time=10")
    done = subprocess.run(["sbatch", *options, BATCH, *steps], env=env, capture_output=True, text=True, check=True)
    job = done.stdout.strip()
    before = copied.latest.id

    def is_training() -> bool:
        journal = copied.latest.partial("train") / "metrics.jsonl"
        return copied.latest.id != before and journal.is_file() and journal.read_text().count("step_seconds") > 1

    wait_for(is_training)
    _call("scancel", "--batch", "--signal=TERM", job, **slurm)
    wait_for(lambda: "JobState=COMPLETED" in _call("scontrol", "show", "job", job, **slurm))
    run, log = copied.latest, (copied.folder / "job.log").read_text()
    assert "resumed from the checkpoint of step" in log, log
    assert "2 attempts, 2 processes" in copied.pipe("verify", run.id).stdout
