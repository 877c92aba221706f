"""MLflow with its local database and W&B offline: one run, interrupted and resumed, as their own formats have it."""

from __future__ import annotations

import json
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from .project_folder import HELD_AFTER, ProjectFolder, wait_for

pytestmark = [
    pytest.mark.long,
    # of MLflow's own tables, by the newest SQLAlchemy
    pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated:DeprecationWarning"),
]


@pytest.fixture(scope="module")
def tracked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProjectFolder]:
    """The project after a run with both trackers that was stopped in training and resumed."""
    folder = tmp_path_factory.mktemp("tracked")
    project = ProjectFolder.create(folder / "sides")
    project.replace("pipe.yaml", "train:\n", "track: [mlflow, wandb]\n\ntrain:\n  processes: 1\n")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "WANDB_DIR", "WANDB_PROJECT"):
            patch.delenv(name, raising=False)
        patch.setenv("WANDB_MODE", "offline")
        for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
            patch.setenv(name, str(folder / "wandb"))
        with project.paused_training(HELD_AFTER, "run", "export") as pipe:
            wait_for(lambda: list(project.runs.glob("*/tracking/*.json")))
            wait_for((project.checkpoints / "step-00000050" / "manifest.json").exists)
            wait_for(lambda: all(has_step(project, name, 50) for name in ("mlflow", "wandb")))
            pipe.send_signal(signal.SIGINT)
            _, stderr = pipe.communicate(timeout=300)
        assert "warning: mlflow" not in stderr, stderr
        project.pipe("run", "--resume")
        yield project


def has_step(project: ProjectFolder, tracker: str, step: int) -> bool:
    path = project.latest.path / "tracking" / f"{tracker}.json"
    return path.exists() and json.loads(path.read_text())["steps"].get("train", 0) >= step


def read_lines(project: ProjectFolder) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (project.latest.output("train") / "metrics.jsonl").read_text().splitlines()]


def loss_curve(project: ProjectFolder) -> list[tuple[int, float]]:
    return [(line["step"], line["loss"]) for line in read_lines(project) if "loss" in line]


@dataclass(frozen=True)
class WandBRun:
    ids: set[str]
    config: dict[str, Any]
    summary: dict[str, Any]
    history: list[dict[str, Any]]
    artifacts: dict[str, set[str]]


def read_wandb(folder: Path) -> WandBRun:
    """Read the records of offline runs in the order in which `wandb sync` sends them."""
    run = WandBRun(set(), {}, {}, [], {})
    for path in sorted(folder.glob("offline-run-*/*.wandb")):
        for record in read_records(path):
            kind = record.WhichOneof("record_type")
            if kind == "run":
                run.ids.add(record.run.run_id)
            elif kind == "config":
                run.config.update({item.key: json.loads(item.value_json) for item in record.config.update})
            elif kind == "summary":
                run.summary.update(items(record.summary.update))
            elif kind == "history":
                run.history.append(items(record.history.item))
            elif kind == "artifact":
                run.artifacts[record.artifact.name] = {entry.path for entry in record.artifact.manifest.contents}
    return run


def items(entries: Any) -> dict[str, Any]:
    return {"/".join(entry.nested_key) or entry.key: json.loads(entry.value_json) for entry in entries}


def read_records(path: Path) -> Iterator[Any]:
    """Read W&B's file: blocks of LevelDB's log format, after a header of 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    protocol: Any = wandb_internal_pb2  # its types do not name its messages
    data, position, body = path.read_bytes(), 7, b""
    while position + 7 <= len(data):
        left = 32768 - position % 32768
        if left < 7:  # padding at the end of a block
            position += left
            continue
        _, size, kind = struct.unpack("<IHB", data[position : position + 7])
        body += data[position + 7 : position + 7 + size]
        position += 7 + size
        if kind in (1, 4):  # a whole record, or the last part of one
            yield protocol.Record.FromString(body)
            body = b""


def test_mlflow_has_one_run_with_everything(tracked: ProjectFolder, tmp_path: Path) -> None:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{tracked.runs / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("sides")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == (tracked.latest.id, "FINISHED")
    assert run.data.params["train.lr"] == "0.02"
    curve = [(metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, "train/loss")]
    assert sorted(curve) == loss_curve(tracked), "each step once, though training was resumed from an earlier one"
    assert len(client.get_metric_history(run.info.run_id, "validation/accuracy")) == 12
    assert run.data.metrics["test/accuracy"] == tracked.latest.metrics["accuracy"]
    bundle = tracked.latest.bundle()
    assert run.data.tags["pipe.verdict"] == "pass"
    assert run.data.tags["pipe.digest.bundle"] == bundle.digest
    assert run.data.tags["pipe.digest.checkpoint"] == bundle.manifest.ancestors.checkpoint
    for name in ("export/bundle/model.onnx", "evaluate/verdict.json"):
        copy = Path(client.download_artifacts(run.info.run_id, name, str(tmp_path)))
        assert copy.read_bytes() == (tracked.latest.path / name).read_bytes()
    assert "report.html" in {file.path for file in client.list_artifacts(run.info.run_id)}


def test_unknown_run_is_sent_to_a_file_store_completely(
    tracked: ProjectFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient

    project = tracked.copy(tmp_path / "sides")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # deprecated by MLflow
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "mine")
    command = (sys.executable, "-m", "pipeline.tracking", "mlflow", str(project.latest.path))
    done = subprocess.run(command, cwd=project.folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    client = MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("mine").experiment_id])
    curve = [(metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, "train/loss")]
    assert sorted(curve) == loss_curve(project)
    assert run.data.tags["pipe.digest.bundle"] == project.latest.bundle().digest
    copy = Path(client.download_artifacts(run.info.run_id, "export/bundle/model.onnx", str(tmp_path)))
    assert copy.read_bytes() == (project.latest.bundle_path / "model.onnx").read_bytes()


def test_wandb_has_one_run_with_everything(tracked: ProjectFolder) -> None:
    folders = list((tracked.runs / "wandb").glob("offline-run-*"))
    assert len(folders) == 2, "one for each of the two commands"
    run = read_wandb(tracked.runs / "wandb")
    assert len(run.ids) == 1
    assert run.config["train.lr"] == "0.02"
    assert run.config["pipe.digest.bundle"] == tracked.latest.bundle().digest
    assert [(row["_step"], row["train/loss"]) for row in run.history if "train/loss" in row] == loss_curve(tracked)
    assert run.summary["verdict"] == "pass"
    assert run.summary["test/accuracy"] == tracked.latest.metrics["accuracy"]
    assert {"export/bundle/model.onnx", "export/bundle/card.md"} <= run.artifacts["sides-model"]
    assert {"evaluate/verdict.json", "report.html"} <= run.artifacts["sides-results"]
