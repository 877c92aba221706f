"""One step in a pod of a workflow: real processes, as a container starts them."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml

from k8s.objects.training import CONFIG_VARIABLE
from k8s.workflows import RUNS_FOLDER
from pipeline.contract.config import override_config
from pipeline.contract.run import STEPS, Run
from pipeline.executors.cluster import render_training, render_workflow
from pipeline.history import Project, lock_run
from pipeline.pod import main, run_in_pod
from pipeline.system.errors import ConfigError, LostContact
from pipeline.system.sources import SOURCE_ROOT
from pipeline.training.launchers import POD_NUMBER
from pipeline.training.node import PASSING_EXIT_CODE

TINY = Path(__file__).resolve().parents[1] / "project"
IMAGE = "registry.example/train@sha256:" + "1" * 64
OURS = "python -m pipeline.steps.prepare"


@pytest.fixture
def tiny(tmp_path: Path) -> Project:
    shutil.copytree(TINY, tmp_path / "sides", ignore=shutil.ignore_patterns("__pycache__", ".mypy_cache"))
    return Project(tmp_path / "sides", tmp_path / "volume")


def container(**env: str) -> dict[str, str]:
    """Return the environment of a container."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PYTHONPATH": str(SOURCE_ROOT), "PATH": path, "PYTHONSAFEPATH": "1", **env}


def start(project: Project, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words, cwd=project.root, env=container(**env), capture_output=True, text=True, timeout=240, check=False
    )


def begin(project: Project, *words: str, **env: str) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen(words, cwd=project.root, env=container(**env), stdout=pipe, stderr=pipe, text=True)


def config_text(project: Project) -> str:
    return json.dumps(project.config().model_dump(mode="json"))


def pod(step: str, run: Path, *argv: str) -> tuple[str, ...]:
    return ("python", "-m", "pipeline.pod", step, str(run), "--", *argv)


def test_the_first_step_makes_the_run_and_its_record(tiny: Project) -> None:
    run = tiny.runs / "wf-1"
    argv = ("python", "-m", "pipeline.steps.prepare", str(run))
    done = start(tiny, *pod("prepare", run, *argv), **{CONFIG_VARIABLE: config_text(tiny)})
    assert done.returncode == 0, done.stderr
    record = Run(run).read().steps["prepare"]
    assert (record.status, record.argv) == ("done", argv)
    assert Run(run).config == tiny.config()
    assert (run / "prepare" / "data.json").is_file()


def test_command_that_the_image_does_not_expect_is_refused(tiny: Project) -> None:
    run = tiny.runs / "wf-1"
    with pytest.raises(ConfigError) as caught:
        run_in_pod("prepare", Run(run), ("python", "-m", "prepare"), config_text(tiny))
    assert f"prepare: the workflow runs `python -m prepare`, but this image needs `{OURS} {run}`" in str(caught.value)


def test_step_with_missing_inputs_does_not_run_earlier_steps(tiny: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tiny.root)
    run = tiny.runs / "wf-1"
    with pytest.raises(ConfigError, match="but check has to run: never run"):
        run_in_pod("train", Run(run), ("python", "-m", "pipeline.training.node", str(run)), config_text(tiny))
    assert not (run / "prepare").exists()


@pytest.mark.parametrize(
    ("text", "message"), [("", "has no configuration"), ("{", "not JSON"), ("{}", "`name` is missing")]
)
def test_invalid_configuration_is_reported_and_creates_no_run(
    text: str, message: str, tiny: Project, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(CONFIG_VARIABLE, text)
    run = tiny.runs / "wf-1"
    handler = signal.getsignal(signal.SIGTERM)
    try:
        assert main(["prepare", str(run), "--", *OURS.split(), str(run)]) == 2
    finally:
        signal.signal(signal.SIGTERM, handler)
    stderr = capsys.readouterr().err
    assert stderr.startswith("error: ")
    assert message in stderr
    assert not run.exists()


def test_secondary_pod_runs_the_command_and_writes_no_record(tiny: Project) -> None:
    run = tiny.runs / "wf-1"
    own = "import os, sys; print(os.getpid()); sys.exit(7)"
    done = start(tiny, *pod("train", run, "python", "-c", own), JOB_COMPLETION_INDEX="1")
    assert (done.returncode, done.stderr) == (7, "")
    assert not run.exists()


def test_secondary_pod_waits_for_the_first_one_to_begin(tiny: Project) -> None:
    run = Run(tiny.runs / "alone")
    argv = (*pod("train", run.path)[:-1], "--begin", "--", "python", "-c", "print('takes part')")
    with begin(tiny, *argv, **{POD_NUMBER: "1"}) as process:
        assert process.stderr is not None
        assert "waiting for the first pod to run the steps before" in process.stderr.readline()
        run.path.mkdir(parents=True)
        (run.path / "run.json").write_text("{}")
        assert process.poll() is None
        for step in ("check", "prepare"):
            run.output(step).mkdir()
        out, _ = process.communicate(timeout=300)
    assert (process.returncode, out) == (0, "takes part\n")


def test_replacement_pod_waits_for_the_lock_of_its_predecessor(
    tiny: Project, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a network volume the lock may outlive its pod; failing then would end the whole Job."""
    run, started = Run(tiny.runs / "wf-1"), threading.Event()
    monkeypatch.setattr("pipeline.pod.resume_run", lambda *_: started.set())
    argv = ("python", "-m", "pipeline.training.node", str(run.path))
    run.path.mkdir(parents=True)
    with ThreadPoolExecutor(1) as pods:
        with lock_run(run):
            begun = pods.submit(run_in_pod, "train", run, argv, config_text(tiny))
            while "is working on it; waiting for it" not in capsys.readouterr().err:
                assert not begun.done()
                time.sleep(0.01)
            assert not started.is_set()
        begun.result(timeout=300)
    assert started.is_set()


def test_transient_error_has_the_exit_code_for_another_pod(
    tiny: Project, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lost(*_: object, **__: object) -> None:
        raise LostContact("train: no answer")

    monkeypatch.setattr("pipeline.pod.run_in_pod", lost)
    handler = signal.getsignal(signal.SIGTERM)
    try:
        assert main(["train", str(tiny.runs / "wf-1"), "--", "python"]) == PASSING_EXIT_CODE
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert "no answer" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.parametrize("standing", [True, False], ids=["as-it-stands", "rendered"])
def test_standalone_training_creates_its_run_with_two_pods(tiny: Project, tmp_path: Path, standing: bool) -> None:
    """The Job's pods run on an empty volume, without `pipe`."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        meeting = f"127.0.0.1:{free.getsockname()[1]}"
    words = ["train.image=" + IMAGE, "train.nodes=2", "train.processes=1", "cluster.executor=kubernetes"]
    if standing:
        text = (SOURCE_ROOT / "k8s" / "manifests" / "train" / "base" / "job.yaml").read_text()
        text = text.replace("train.nodes=1", "train.nodes=2").replace("train.processes=2", "train.processes=1")
    else:
        files = render_training(tiny, override_config(tiny.config(), words, "test"), str(tmp_path / "out"))
        text = next(file for file in files if file.name.startswith("job-")).read_text()
    text = re.sub(r"model-train-0\.model-train:29400|sides-train-\w+-0\.sides-train-\w+:29400", meeting, text)
    (container,) = yaml.safe_load(text)["spec"]["template"]["spec"]["containers"]
    words = [word.replace("/runs/", f"{tiny.runs}/") for word in (*container["command"], *container["args"])]
    env = {entry["name"]: entry["value"] for entry in container["env"] if "value" in entry}
    with ThreadPoolExecutor(2) as pods:
        done = list(pods.map(lambda number: start(tiny, *words, **{**env, POD_NUMBER: number}), ("0", "1")))
    assert [pod.returncode for pod in done] == [0, 0], "".join(pod.stderr for pod in done)
    assert "pipe join" not in done[0].stderr, "the Job starts the other pods"
    (run,) = map(Run, tiny.runs.glob("*/run.json"))
    run = Run(run.path.parent)
    statuses = {name: record.status for name, record in run.read().steps.items()}
    assert statuses == dict.fromkeys(("check", "prepare", "train"), "done")
    assert (run.output("train") / "model.safetensors").is_file()


@pytest.mark.parametrize("words", [["train", "run"], ["train", "run", "--"]])
def test_missing_command_prints_the_usage(words: list[str]) -> None:
    with pytest.raises(SystemExit, match=r"usage: python -m pipeline\.pod STEP RUN -- ARGV"):
        main(words)


@pytest.mark.long
def test_a_rendered_workflow_runs_the_whole_pipeline(tiny: Project, tmp_path: Path) -> None:
    """Container after container, as Argo starts them; all but the last, which needs a cluster."""
    words = ["train.image=" + IMAGE, "package.builder=none"]
    config = override_config(tiny.config(), words, "test")
    _, file = render_workflow(tiny, config, "argo", str(tmp_path / "out"))
    made = yaml.safe_load(file.read_text())
    templates = {template["name"]: template for template in made["spec"]["templates"]}
    for task in templates["pipeline"]["dag"]["tasks"][:-1]:
        container = templates[task["name"]]["container"]
        done = start(tiny, *_words(container, tiny), **_environment(container, tiny))
        assert done.returncode == 0, done.stderr
    run = Run(tiny.runs / "pipeline-abcde")
    assert {name: record.status for name, record in run.read().steps.items()} == dict.fromkeys(STEPS[:-1], "done")
    assert run.bundle().manifest.verdict in ("pass", "no-baseline")


def _submitted(text: str, project: Project) -> str:
    """Substitute Argo's variables, and the volume by a folder of this machine."""
    return text.replace("{{workflow.name}}", "pipeline-abcde").replace(f"{RUNS_FOLDER}/", f"{project.runs}/")


@pytest.mark.long
def test_run_of_an_evicted_pod_is_continued_by_another(tiny: Project) -> None:
    run = tiny.runs / "wf-1"
    slow = override_config(tiny.config(), ["train.epochs=100"], "test")  # long enough to be interrupted
    env = {CONFIG_VARIABLE: json.dumps(slow.model_dump(mode="json"))}
    for step in ("check", "prepare"):
        argv = pod(step, run, "python", "-m", f"pipeline.steps.{step}", str(run))
        assert start(tiny, *argv, **env).returncode == 0
    argv = pod("train", run, "python", "-m", "pipeline.training.node", str(run))
    with begin(tiny, *argv, **env) as process:
        assert process.stderr is not None
        next(line for line in process.stderr if "train |" in line)  # its processes have begun
        process.send_signal(signal.SIGTERM)
        rest = process.stderr.read()
    assert process.returncode == 128 + signal.SIGTERM, rest
    assert Run(run).read().steps["train"].status == "interrupted"
    assert not (run / "train").exists()
    done = start(tiny, *argv, **env)
    assert done.returncode == 0, done.stderr
    assert Run(run).read().steps["train"].status == "done"


@pytest.mark.long
def test_pods_of_a_workflow_train_together(tiny: Project, tmp_path: Path) -> None:
    """Pods of the JobSet that Argo makes: the first keeps the records, and all use its rendezvous."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        meeting = f"127.0.0.1:{free.getsockname()[1]}"
    words = ["train.image=" + IMAGE, "train.nodes=2", "train.processes=1", "cluster.workload=jobset"]
    _, file = render_workflow(tiny, override_config(tiny.config(), words, "test"), "argo", str(tmp_path / "out"))
    text = file.read_text().replace("{{workflow.name}}-train-node-0-0.{{workflow.name}}-train:29400", meeting)
    made = yaml.safe_load(text)
    templates = {template["name"]: template for template in made["spec"]["templates"]}
    for step in ("check", "prepare"):
        first = templates[step]["container"]
        assert start(tiny, *_words(first, tiny), **_environment(first, tiny)).returncode == 0
    (job,) = yaml.safe_load(templates["train"]["resource"]["manifest"])["spec"]["replicatedJobs"]
    (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
    with ThreadPoolExecutor(2) as pods:
        done = list(pods.map(lambda number: _pod(container, tiny, number), ("0", "1")))
    assert [pod.returncode for pod in done] == [0, 0], "".join(pod.stderr for pod in done)
    assert "pipe join" not in done[0].stderr, "the Job starts the other pods"
    run = Run(tiny.runs / "pipeline-abcde")
    assert run.read().steps["train"].status == "done"
    assert len(list((run.path / "logs").glob("train*.log"))) == 2


def _pod(container: dict[str, Any], project: Project, number: str) -> subprocess.CompletedProcess[str]:
    return start(project, *_words(container, project), **{**_environment(container, project), POD_NUMBER: number})


def _words(container: dict[str, Any], project: Project) -> list[str]:
    return [_submitted(word, project) for word in container["command"]]


def _environment(container: dict[str, Any], project: Project) -> dict[str, str]:
    return {entry["name"]: _submitted(entry["value"], project) for entry in container["env"] if "value" in entry}
