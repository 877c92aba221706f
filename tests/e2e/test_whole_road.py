"""One small project walked down the whole road by the real command, then broken in the ways that happen."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import onnx
import psutil
import pytest
from onnx import numpy_helper

from pipeline.service import any_port, request

HELPER = "SCALE = 2.0\n"
CODEC = """
import numpy as np
from pipeline.spec.errors import InvalidPayload

class PointCodec:
    def decode(self, instances):
        points = np.asarray(instances, dtype=np.float32)
        if points.ndim != 2 or points.shape[1] != 2:
            raise InvalidPayload("instances: each must be two numbers")
        return {"point": points}

    def encode(self, outputs):
        return [{"inside": bool(row[1] > row[0])} for row in outputs["scores"]]
"""
TASK = """
import numpy as np
import torch
from codec import PointCodec
from helper import SCALE
from torch import nn
from torch.nn import functional

class Circle:
    inputs = ("point",)
    outputs = ("scores",)
    classes = ("outside", "inside")

    def model(self):
        return nn.Sequential(nn.Linear(2, 32), nn.Dropout(0.1), nn.Tanh(), nn.Linear(32, 2))

    def data(self, split):
        seed = ("train", "validation", "test").index(split)
        points = np.random.default_rng(seed).normal(size=(400, 2)) * SCALE
        inside = (np.hypot(*points.T) < SCALE).astype(np.int64)
        return {**PointCodec().decode(points), "label": inside}

    def loss(self, outputs, batch):
        return functional.cross_entropy(outputs, batch["label"])

    def metrics(self, outputs, batch):
        return {"accuracy": (outputs.argmax(1) == batch["label"]).float()}

    def predicted(self, outputs):
        return outputs.argmax(1)

    def actual(self, batch):
        return batch["label"]

    def baseline(self):
        return lambda batch: torch.tensor([[1.0, 0.0]]).repeat(len(batch["label"]), 1)

    def example(self):
        return [[0.0, 0.1], [5.0, 5.0]]
"""
CONFIG = """
name: circle
task: task.py:Circle
codec: codec.py:PointCodec
train: {{epochs: 40, batch_size: 50, lr: 0.02, checkpoint_every: 10, log_every: 4}}
evaluate: {{margin: 0.05}}
package: {{build: never}}
deploy: {{port: {port}}}
"""


class Home:
    """A project folder and the command run in it."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @property
    def runs(self) -> list[Path]:
        return sorted(path for path in (self.root / "runs").iterdir() if (path / "run.json").exists())

    @property
    def env(self) -> dict[str, str]:
        return {**os.environ, "PYTHONSAFEPATH": "1", "KUBECONFIG": str(self.root / "no-kubeconfig")}

    def pipe(self, *words: str, status: int = 0) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, "-m", "pipeline", *words],
            cwd=self.root, env=self.env, capture_output=True, text=True, timeout=180, check=False,
        )  # fmt: skip
        assert done.returncode == status, f"{words}: exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def start(self, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "pipeline", *words],
            cwd=self.root, env=self.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def actions(self, *words: str) -> dict[str, tuple[str, str]]:
        steps = json.loads(self.pipe("plan", "-o", "json", *words).stdout)
        return {step["name"]: (step["action"], step["reason"]) for step in steps}

    def weights(self, run: Path) -> bytes:
        return (run / "train" / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def walked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    """The road walked once, its service stopped at the end; tests that change anything take a copy."""
    root = tmp_path_factory.mktemp("circle")
    for name, text in (("helper.py", HELPER), ("codec.py", CODEC), ("task.py", TASK), ("README.md", "A circle.\n")):
        (root / name).write_text(text)
    (root / "pipe.yaml").write_text(CONFIG.format(port=any_port()))
    home = Home(root)
    home.pipe("run", "all")
    yield home
    home.pipe("stop")


@pytest.fixture
def copied(walked: Home, tmp_path: Path) -> Iterator[Home]:
    root = tmp_path / "project"
    shutil.copytree(walked.root, root, symlinks=True)
    (root / "runs" / "live.json").unlink()  # the service belongs to the original
    home = Home(root)
    yield home
    home.pipe("stop")


def test_the_road_ends_in_a_service_that_names_its_bundle(walked: Home) -> None:
    run = walked.runs[0]
    steps = json.loads((run / "run.json").read_text())["steps"]
    assert {name: record["status"] for name, record in steps.items()} == dict.fromkeys(
        ("prepare", "train", "evaluate", "export", "package", "deploy"), "done"
    )
    live = json.loads((walked.root / "runs" / "live.json").read_text())
    status, headers, answer = request(
        live["host"], live["port"], "POST", "/v1/models/circle:predict", {"instances": [[0, 0], [9, 9]]}
    )
    assert (status, answer) == (200, {"predictions": [{"inside": True}, {"inside": False}]})
    assert headers["x-bundle-digest"] == live["bundle"]
    status, _, answer = request(
        live["host"], live["port"], "POST", "/v1/models/circle:predict", {"instances": [[0, 0, 0]]}
    )
    assert (status, answer) == (400, {"error": "instances: each must be two numbers"})
    assert "golden requests are answered" in walked.pipe("verify").stdout
    assert (run / "report.html").exists()


def test_an_unchanged_rerun_reuses_everything_but_deploy_in_under_a_second(walked: Home) -> None:
    overheads = []
    for _ in range(3):
        started = time.monotonic()
        told = walked.pipe("run", "all").stderr
        wall = time.monotonic() - started
        overheads.append(wall - json.loads((walked.runs[-1] / "run.json").read_text())["steps"]["deploy"]["seconds"])
    for step in ("prepare", "train", "evaluate", "export", "package"):
        assert f"{step}: reused, unchanged since {walked.runs[0].name}" in told
    assert "golden answers are equal" in told
    assert min(overheads) < 1.0


def test_a_changed_helper_reruns_training_and_a_changed_readme_nothing(copied: Home) -> None:
    (copied.root / "README.md").write_text("Another text.\n")
    assert {action for name, (action, _) in copied.actions().items() if name != "deploy"} == {"reuse"}
    (copied.root / "helper.py").write_text("SCALE = 2.5\n")
    actions = copied.actions()
    assert actions["train"][0] == "run"
    assert actions["prepare"] == ("run", "helper.py changed")
    copied.pipe("plan", "--exit-code", status=4)


def test_a_setting_that_changed_is_named(copied: Home) -> None:
    assert copied.actions("train.lr=0.5")["train"] == ("run", "train.lr 0.02 → 0.5")


def test_one_flipped_byte_of_a_cached_output_is_noticed(copied: Home) -> None:
    path = copied.runs[-1] / "train" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    action, reason = copied.actions()["train"]
    assert action == "run"
    assert "train/model.safetensors" in reason
    assert "changed on disk" in reason


def test_a_corrupted_initializer_is_refused_by_verify_and_by_the_server(copied: Home) -> None:
    bundle = copied.runs[-1] / "export" / "bundle"
    model = onnx.load(bundle / "model.onnx")
    weight = model.graph.initializer[0]
    weight.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weight) + 1, weight.name))
    onnx.save(model, bundle / "model.onnx")
    assert "model.onnx" in copied.pipe("verify", str(bundle), status=2).stderr
    copied.pipe("verify", status=2)
    argv = [sys.executable, "-m", "serve", str(bundle), "--port", str(any_port())]
    served = subprocess.run(argv, env=copied.env, capture_output=True, text=True, timeout=60, check=False)
    assert served.returncode == 2
    assert "model.onnx: content changed since export" in served.stderr


def test_a_killed_worker_costs_nothing_after_resume(copied: Home) -> None:
    reference = copied.weights(copied.runs[0])
    process = copied.start("run", "--until", "train", "--force", "train")
    run, worker = _training_worker(copied, process)
    worker.kill()
    _, told = process.communicate(timeout=120)
    assert process.returncode == 1
    assert f"pipe run --resume {run.name}" in told
    copied.pipe("run", "--resume")
    assert copied.weights(run) == reference
    lines = [json.loads(line) for line in (run / "train" / "metrics.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in lines if "loss" in line]
    assert steps == sorted(set(steps))


def test_a_damaged_checkpoint_is_passed_over_for_the_newest_whole_one(copied: Home) -> None:
    reference = copied.weights(copied.runs[0])
    process = copied.start("run", "--until", "train", "--force", "train")
    run, worker = _training_worker(copied, process)
    worker.kill()
    process.communicate(timeout=120)
    newest = max((run / "train.partial" / "checkpoints").glob("step-*"))
    state = newest / "state.safetensors"
    state.write_bytes(state.read_bytes()[:-1] + b"x")
    assert f"warning: checkpoint {newest.name} is damaged" in copied.pipe("run", "--resume").stderr
    assert copied.weights(run) == reference


def test_killing_the_command_itself_leaves_no_process_and_a_resumable_run(copied: Home) -> None:
    process = copied.start("run", "--until", "train", "--force", "train")
    run, worker = _training_worker(copied, process)
    agents = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.communicate(timeout=30)
    gone, alive = psutil.wait_procs([worker, *agents], timeout=30)
    assert not alive, f"still there: {alive}, gone: {gone}"
    copied.pipe("run", "--resume")
    assert copied.weights(run) == copied.weights(copied.runs[0])


def test_control_c_exits_130_and_says_how_to_go_on(copied: Home) -> None:
    process = copied.start("run", "--until", "train", "--force", "train")
    run, worker = _training_worker(copied, process)
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 130
    assert told.splitlines()[-1] == f"error: interrupted; nothing is lost, `pipe run --resume {run.name}` goes on"
    psutil.wait_procs([worker], timeout=20)
    assert not worker.is_running()
    copied.pipe("run", "--resume")
    assert copied.weights(run) == copied.weights(copied.runs[0])


def test_a_rejected_candidate_stops_the_road_and_a_forced_one_is_on_record(copied: Home) -> None:
    told = copied.pipe("run", "--until", "export", "evaluate.require={accuracy: 1.1}", status=3).stderr
    assert "required 1.1" in told.splitlines()[-1]
    assert not (copied.runs[-1] / "export").exists()
    words = ("evaluate.require={accuracy: 1.1}", "evaluate.force_reason=a demonstration")
    copied.pipe("run", "--until", "export", *words)
    assert json.loads((copied.runs[-1] / "evaluate" / "verdict.json").read_text())["verdict"] == "forced"
    assert "a demonstration" in (copied.runs[-1] / "export" / "bundle" / "card.md").read_text()


def test_what_is_deployed_is_the_champion_of_the_next_candidate(copied: Home) -> None:
    copied.pipe("run", "--until", "evaluate", "train.seed=1")
    verdict = json.loads((copied.runs[-1] / "evaluate" / "verdict.json").read_text())
    deployed = json.loads((copied.root / "runs" / "registry.json").read_text())["names"]["champion"]["bundle"]
    assert verdict["baseline"] == {"kind": "champion", "bundle": deployed}


def test_a_new_bundle_takes_the_port_over_without_a_lost_request(copied: Home) -> None:
    port = any_port()
    copied.pipe("run", "all", f"deploy.port={port}")
    before = json.loads((copied.root / "runs" / "live.json").read_text())
    process = copied.start("run", "all", f"deploy.port={port}", "train.seed=1")
    answers = []
    while process.poll() is None:
        answers.append(request("127.0.0.1", port, "POST", "/v1/models/circle:predict", {"instances": [[0, 0]]})[:2])
    process.communicate()
    assert process.returncode == 0
    assert {status for status, _ in answers} == {200}
    after = json.loads((copied.root / "runs" / "live.json").read_text())
    assert (after["port"], after["bundle"] != before["bundle"]) == (port, True)
    assert request("127.0.0.1", port, "GET", "/v2/health/ready")[1]["x-served-by"] == str(after["pid"])
    assert not psutil.pid_exists(before["pid"])


def test_a_taken_port_is_left_alone_and_the_next_one_said_aloud(copied: Home) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        told = copied.pipe("run", "all", f"deploy.port={port}").stderr
    assert f"port {port} is taken; using " in told


def test_the_service_holds_nothing_of_the_command_that_started_it(copied: Home) -> None:
    command = f"{sys.executable} -m pipeline run all deploy.port={any_port()} 2>&1 | cat"
    done = subprocess.run(
        command, shell=True, cwd=copied.root, env=copied.env, capture_output=True, text=True, timeout=120, check=True
    )
    assert "service " in done.stdout
    live = json.loads((copied.root / "runs" / "live.json").read_text())
    held = {Path(file.path) for file in psutil.Process(live["pid"]).open_files()}
    assert (copied.root / "runs" / ".lock") not in held


def test_two_runs_at_once_do_not_meet(copied: Home) -> None:
    process = copied.start("run", "--until", "train", "--force", "train")
    _training_worker(copied, process)
    told = copied.pipe("run", "all", status=2).stderr
    assert f"(pid {process.pid} on " in told.splitlines()[-1]
    process.communicate(timeout=120)
    assert process.returncode == 0


def test_without_a_cluster_the_manifests_are_rendered_and_the_exit_says_so(copied: Home) -> None:
    told = copied.pipe("run", "all", "deploy.target=kubernetes", status=1).stderr
    manifests = copied.runs[-1] / "deploy" / "manifests"
    assert f"kubectl apply --server-side -k {manifests}" in told.splitlines()[-1]
    assert (manifests / "kustomization.yaml").exists()
    copied.pipe("deploy", "--render")
    assert (copied.runs[-1] / "deploy" / "manifests" / "kustomization.yaml").exists()


@pytest.mark.parametrize(
    ("break_it", "sentence"),
    [
        (lambda text: text.replace('return {**PointCodec().decode(points), "label": inside}',
                                   'n = 0 if split == "test" else 400; '
                                   'return {**PointCodec().decode(points[:n].reshape(-1, 2)), "label": inside[:n]}'),
         "data('test'): the split is empty"),
        (lambda text: text.replace("def loss(self", "def lost(self"), "has no method loss(outputs, batch)"),
        (lambda text: text.replace('cross_entropy(outputs, batch["label"])',
                                   'cross_entropy(outputs, batch["label"]) * float("inf")'),
         "the loss is not finite at step"),
        (lambda text: text.replace("class Circle", "class Square"), "task.py has no class Circle"),
        (lambda text: text + "def (", "task.py, line"),
    ],
)  # fmt: skip
def test_a_mistake_in_the_task_is_one_line_and_exit_2(
    copied: Home, break_it: Callable[[str], str], sentence: str
) -> None:
    task = copied.root / "task.py"
    task.write_text(break_it(task.read_text()))
    told = copied.pipe("run", "--until", "train", status=2).stderr.splitlines()
    assert sentence in told[-1]
    assert sum(line.startswith("error: ") for line in told) == 1


def _training_worker(home: Home, process: subprocess.Popen[str]) -> tuple[Path, psutil.Process]:
    """Wait until the newest run has a checkpoint half-way, and find one of its two workers."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()
        partial = home.runs[-1] / "train.partial"
        if len(list(partial.glob("checkpoints/step-*"))) >= 2:
            workers = _workers(process.pid)
            if workers:
                return home.runs[-1], workers[-1]
        time.sleep(0.01)
    raise AssertionError("training made no checkpoint within a minute")


def _workers(pid: int) -> list[psutil.Process]:
    found: list[psutil.Process] = []
    for child in psutil.Process(pid).children(recursive=True):
        try:
            argv: list[Any] = child.cmdline()
        except psutil.NoSuchProcess:
            continue
        if "train" in argv and "torch.distributed.run" not in argv:
            found.append(child)
    return found
