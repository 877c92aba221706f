from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.contract.config import Config, override_config
from pipeline.contract.run import Run, StepRecord
from pipeline.executors.cluster import ClusterExecutor
from pipeline.executors.executor import check_config
from pipeline.history import Project, write_record
from pipeline.plan import Decision
from pipeline.system.errors import ConfigError, read_error

from ...k8s.api_server import ApiServer
from ..conftest import NewRun

IMAGE = f"registry.test/tiny@sha256:{'0' * 64}"
ON_CLUSTER = ["cluster.executor=kubernetes", f"train.image={IMAGE}"]


def test_training_on_a_cluster_needs_an_image_but_no_address(config: Config) -> None:
    with pytest.raises(ConfigError, match=r"train\.image is empty"):
        check_config(override_config(config, ON_CLUSTER[:1]))
    check_config(override_config(config, [*ON_CLUSTER, "train.nodes=4"]))
    with pytest.raises(ConfigError, match="latest"):
        check_config(override_config(config, [*ON_CLUSTER[:1], "train.image=tiny:latest"]))


@pytest.fixture
def held(
    project: Project, new_run: NewRun, config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Run, StepRecord]:
    run = new_run()
    monkeypatch.setattr(Run, "config", override_config(config, ON_CLUSTER))
    argv = ("python", "-m", "pipeline.steps.prepare", f"runs/{run.id}")
    record = StepRecord(step="prepare", status="running", key="k" * 64, parts={}, argv=argv)
    write_record(run, record)
    run.log("prepare").parent.mkdir(exist_ok=True)
    return run, record


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServer]:
    server = ApiServer()
    server.write_kubeconfig(tmp_path / "kubeconfig")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    server.add({"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "tiny-runs"}, "spec": {}})
    yield server
    server.close()


@pytest.mark.parametrize(
    ("interrupt", "answer", "questions", "left"),
    [
        (KeyboardInterrupt(), True, 1, 0),
        (KeyboardInterrupt(), False, 1, 1),
        (KeyboardInterrupt(signal.SIGTERM), False, 0, 0),  # SIGTERM leads to no question
    ],
)
def test_interrupted_step_is_cancelled_or_left_by_the_answer(
    interrupt: KeyboardInterrupt,
    answer: bool,
    questions: int,
    left: int,
    held: tuple[Run, StepRecord],
    project: Project,
    api: ApiServer,
) -> None:
    run, record = held
    api.nodes.program = lambda pod: 0 if pod.gone.wait(30) else 1
    questions_seen: list[str] = []
    reported: list[str] = []

    def ask(question: str) -> bool:
        questions_seen.append(question)
        return answer

    def raise_it() -> None:
        raise interrupt

    executor = ClusterExecutor(project.root, reported.append, ask)
    with pytest.raises(KeyboardInterrupt):
        executor.execute(run, record, raise_it)
    assert len([path for path in api.objects if "/jobs/" in path]) == left
    job = reported[1].split("job/")[1].split()[0]
    assert questions_seen == [f"job/{job} runs on the cluster. Cancel it? [Y/n] "] * questions
    assert executor.is_running(run, Decision("prepare", "run", "", record.key, {})) is bool(left)


def test_pod_that_wrote_to_another_volume_fails_the_step(
    held: tuple[Run, StepRecord], project: Project, api: ApiServer
) -> None:
    run, record = held
    executor = ClusterExecutor(project.root, print, lambda _question: True)
    assert executor.execute(run, record, lambda: None) == 1
    error = str(read_error(run.partial("prepare")))
    assert f"wrote nothing to {run.path}; to fix it: the volume claim tiny-runs must hold" in error


def test_a_job_that_cannot_be_removed_does_not_fail_its_step(
    held: tuple[Run, StepRecord], project: Project, api: ApiServer
) -> None:
    run, record = held
    run.partial("prepare").mkdir()
    api.fail("DELETE", "/jobs/", status=500)
    reported: list[str] = []
    executor = ClusterExecutor(project.root, reported.append, lambda _question: True)
    assert executor.execute(run, record, lambda: None) == 0
    assert "is left on the cluster" in reported[-1]
