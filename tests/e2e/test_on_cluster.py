"""The pipeline with its steps as Jobs, on a simulated cluster whose pods really run their commands."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.contract.run import all_runs
from pipeline.plan import CLUSTER_STEPS

from ..k8s.api_server import ApiServer
from ..k8s.mock_pods import MockPod
from .project_folder import ProjectFolder, wait_for

IMAGE = f"train.image=registry.test/sides@sha256:{'0' * 64}"
WORDS = ("--executor", "kubernetes", IMAGE, "train.processes=1")


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServer]:
    server = ApiServer()
    server.write_kubeconfig(tmp_path / "kubeconfig")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    server.add({"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "sides-runs"}, "spec": {}})
    yield server
    server.close()


@pytest.fixture
def project(api: ApiServer, tmp_path: Path) -> ProjectFolder:
    """A project whose folder of runs is the volume of the pods."""
    project = ProjectFolder.create(tmp_path / "sides")
    api.nodes.program = lambda pod: play(pod, project.folder)
    return project


def play(pod: MockPod, folder: Path, prefix: tuple[str, ...] = ()) -> int:
    """Run the pod's command as a node does, with its environment and volume; send SIGTERM when the pod is deleted."""
    container = pod.spec["containers"][0]
    words = [*container["command"], *container.get("args", [])]
    argv = [sys.executable if word == "python" else word.replace("/project/", f"{folder}/") for word in words]
    env = {item["name"]: item.get("value", str(pod.index)) for item in container["env"]}
    known = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    process = subprocess.Popen(
        [*prefix, *argv],
        cwd=folder,
        env={**known, **env, "HOME": str(folder)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    ended = threading.Event()
    threading.Thread(target=_end_with_pod, args=(pod, process, ended), daemon=True).start()
    with process:
        assert process.stdout is not None
        for line in process.stdout:
            pod.log(line.rstrip("\n"))
    ended.set()
    return process.returncode


def _end_with_pod(pod: MockPod, process: subprocess.Popen[str], ended: threading.Event) -> None:
    while not ended.wait(0.05):
        if pod.gone.is_set():
            process.terminate()
            return


def test_step_on_the_cluster_is_recorded_like_a_local_one(api: ApiServer, project: ProjectFolder) -> None:
    done = project.pipe("run", "--until", "prepare", *WORDS)
    assert f"on context small, server {api.url}, namespace default" in done.stderr
    run = project.latest
    record = run.read().steps["prepare"]
    assert record.status == "done"
    assert list(record.argv) == ["python", "-m", "pipeline.steps.prepare", f"runs/{run.id}"]
    assert record.outputs
    assert run.log("prepare").read_text()
    assert not [path for path in api.objects if "/jobs/" in path or "/services/" in path]
    assert project.plan(*WORDS[2:])["prepare"][0] == "reuse", "where it ran is no part of what it computed"


def test_without_an_image_or_a_cluster_no_run_is_created(
    project: ProjectFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = project.pipe("run", "--until", "prepare", "--executor", "kubernetes", expect=2)
    assert "train.image is empty" in refused.stderr
    assert not project.runs.exists() or not list(project.runs.glob("*/run.json"))
    assert "elsewhere" in project.pipe("run", "--until", "prepare", *WORDS, "--context", "elsewhere", expect=2).stderr


@pytest.mark.long
def test_resume_after_a_killed_pipe_follows_the_running_job(api: ApiServer, project: ProjectFolder) -> None:
    with project.paused_training(20, "run", "--until", "export", *WORDS) as process:
        wait_for(lambda: any("-train-" in pod for pod in list(api.nodes.pods)))
        wait_for(lambda: (project.latest.path / "logs" / "train").exists())
        process.send_signal(signal.SIGKILL)
        process.wait(300)
    done = project.pipe("run", "--resume")
    assert "was started before; following it" in done.stderr
    records = project.latest.read().steps
    assert {name: record.status for name, record in records.items()} == dict.fromkeys(CLUSTER_STEPS, "done")
    trained = [query for method, path, query, _ in api.requests if method == "PATCH" and "-train-" in path]
    assert sum("dryRun" not in query for query in trained) == 2, "one Service and one Job in all"


@pytest.mark.long
def test_interrupted_training_is_cancelled_and_resumes(api: ApiServer, project: ProjectFolder) -> None:
    with project.paused_training(30, "run", "--until", "train", *WORDS) as process:
        wait_for(lambda: all_runs(project.runs) and project.latest.partial("train").exists())
        wait_for(lambda: list(project.checkpoints.glob("*")))
        process.send_signal(signal.SIGINT)
        assert process.wait(300) == 130
        assert not [path for path in api.objects if "/jobs/" in path or "/pods/" in path]
    assert project.latest.read().steps["train"].status == "interrupted"
    project.pipe("run", "--resume")
    assert "resumed from" in project.latest.log("train").read_text()


CALLER, IMAGE_USER = 1234, 10001
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to run processes as other users")


def as_user(uid: int, gid: int) -> tuple[str, ...]:
    """Return the command that starts another as this user, who may read the interpreter wherever it is."""
    rights = ("--inh-caps=-all,+dac_read_search", "--ambient-caps=-all,+dac_read_search")
    return ("setpriv", "--clear-groups", *rights, f"--reuid={uid}", f"--regid={gid}")


@pytest.fixture
def shared(api: ApiServer, tmp_path: Path) -> Iterator[ProjectFolder]:
    """A project in a folder that all users may enter; its pods run as the user in their manifest."""

    def program(pod: MockPod) -> int:
        security = pod.spec["securityContext"]
        return play(pod, volume.folder, as_user(security["runAsUser"], security["runAsGroup"]))

    with tempfile.TemporaryDirectory() as place:
        Path(place).chmod(0o755)
        volume = ProjectFolder.create(Path(place) / "sides")
        (tmp_path / "kubeconfig").rename(Path(place) / "kubeconfig")
        os.environ["KUBECONFIG"] = str(Path(place) / "kubeconfig")  # `api` restores it
        api.nodes.program = program
        yield volume


def give(folder: Path, uid: int) -> None:
    for path in (folder, *folder.rglob("*")):
        os.chown(path, uid, uid)


@needs_root
@pytest.mark.long
@pytest.mark.parametrize(("caller", "writer"), [(CALLER, CALLER), (0, IMAGE_USER)])
def test_pods_write_as_the_owner_of_the_runs_but_never_as_root(shared: ProjectFolder, caller: int, writer: int) -> None:
    give(shared.folder, caller)
    shared.pipe("run", "--until", "prepare", *WORDS, prefix=as_user(caller, caller) if caller else ())
    assert (shared.latest.output("prepare") / "data.json").stat().st_uid == writer


@needs_root
@pytest.mark.long
def test_folder_not_writable_for_pods_is_named_with_its_owner(api: ApiServer, shared: ProjectFolder) -> None:
    give(shared.folder, CALLER)
    api.nodes.program = lambda pod: play(
        pod, shared.folder, as_user(4321, 4321)
    )  # another user than the owner of the volume
    done = shared.pipe("run", "--until", "prepare", *WORDS, prefix=as_user(CALLER, CALLER), expect=2)
    assert "this process is user 4321, and the folder belongs to user 1234" in done.stderr
    assert "Traceback" not in shared.latest.log("check").read_text()


@needs_root
@pytest.mark.long
@pytest.mark.parametrize("caller", [CALLER, 0])
def test_all_steps_write_files_that_other_users_can_read(shared: ProjectFolder, caller: int) -> None:
    give(shared.folder, caller)
    prefix = as_user(caller, caller) if caller else ()
    shared.pipe("run", "--until", "export", *WORDS, prefix=prefix)
    run = shared.latest
    assert {record.status for record in run.read().steps.values()} == {"done"}
    assert not [path for path in run.path.rglob("*") if path.stat().st_mode & 0o444 != 0o444]
