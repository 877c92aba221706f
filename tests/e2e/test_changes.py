"""Changes since an interrupted training began: checkpoints are neither used nor discarded without confirmation."""

from __future__ import annotations

import json
import re
import shutil
import signal
from pathlib import Path

import pytest

from pipeline.contract.run import STEPS, all_runs

from .project_folder import HELD_AFTER, ProjectFolder, until_held

RESUMED = re.compile(r"resumed from the checkpoint of step 5\d of 120")
TRAIN = ("run", "train", "--force", "train", "train.processes=1")


@pytest.fixture(scope="module")
def original(finished: ProjectFolder, tmp_path_factory: pytest.TempPathFactory) -> ProjectFolder:
    """A project whose newest run was interrupted in a training that has checkpoints."""
    project = finished.copy(tmp_path_factory.mktemp("interrupted") / "sides")
    with project.paused_training(HELD_AFTER, *TRAIN) as pipe:
        until_held(project)
        pipe.send_signal(signal.SIGTERM)
        pipe.communicate(timeout=300)
    return project


@pytest.fixture
def interrupted(original: ProjectFolder, tmp_path: Path) -> ProjectFolder:
    return original.copy(tmp_path / "sides")


def test_resume_lists_changes_and_accepts_them_on_request(interrupted: ProjectFolder) -> None:
    run_id = interrupted.latest.id
    checkpoints = sorted(path.name for path in interrupted.checkpoints.iterdir())
    interrupted.replace("task.py", "functional.cross_entropy(", "2 * functional.cross_entropy(")
    stderr = interrupted.pipe("run", "--resume", expect=2).stderr
    assert f"error: since the training of run {run_id} began, this changed: task.py changed; " in stderr
    assert f"`pipe run --resume {run_id} --accept-changes`" in stderr
    assert sorted(path.name for path in interrupted.checkpoints.iterdir()) == checkpoints

    assert RESUMED.search(interrupted.pipe("run", "--resume", "--accept-changes").stderr)
    (acceptance,) = interrupted.latest.read().steps["train"].accepted
    assert acceptance.changes == "task.py changed"
    summary = json.loads((interrupted.latest.output("train") / "summary.json").read_text())
    assert 50 <= summary["best_since"] < 60, "with the loss before, every later checkpoint was worse"
    assert summary["best_step"] >= summary["best_since"]
    assert interrupted.plan("train", "train.processes=1")["train"][0] == "reuse"


@pytest.mark.parametrize(
    ("file", "old", "new", "change"),
    [
        ("points.py", "> np.sin", "< np.sin", "64 of 64 compared training samples have other targets"),
        ("task.py", '"below", "above"', '"above", "below"', "the classes were below, above and are above, below"),
    ],
    ids=["targets", "classes"],
)
def test_changed_targets_are_learned_on_request_only(
    interrupted: ProjectFolder, file: str, old: str, new: str, change: str
) -> None:
    shutil.rmtree(interrupted.runs / "registry")  # with a champion, prepare refuses other classes
    interrupted.replace(file, old, new)
    for _ in range(2):  # prepare has run meanwhile
        stderr = interrupted.pipe("run", "--resume", "--accept-changes", expect=2).stderr
        assert f"error: {change}; the weights so far learned the old ones; to go on from them " in stderr
    assert RESUMED.search(interrupted.pipe("run", "--resume", "--accept-changes", "--yes").stderr)


@pytest.mark.long
def test_resume_ignores_a_comment_and_another_champion(interrupted: ProjectFolder) -> None:
    with (interrupted.folder / "task.py").open("a") as file:
        file.write("# a comment\n")
    interrupted.pipe("registry", "promote", all_runs(interrupted.runs)[1].id)
    assert RESUMED.search(interrupted.pipe("run", "--resume").stderr)


def test_accepted_outputs_are_reused(copied: ProjectFolder) -> None:
    copied.replace("task.py", "functional.cross_entropy(", "1 * functional.cross_entropy(")
    assert copied.plan()["train"] == ("run", "task.py changed")
    assert copied.pipe("run", "--from", "evaluate", expect=2).stderr.endswith("has to run: task.py changed\n")
    accepted = json.loads(copied.pipe("accept", "-o", "json").stdout)
    assert [row["step"] for row in accepted] == ["train", "evaluate", "export"]
    actions = {step: action for step, (action, _) in copied.plan().items()}
    assert actions == {**dict.fromkeys(STEPS, "reuse"), "check": "run", "deploy": "run"}, "a check takes seconds"
    copied.pipe("report")
    assert "train: task.py changed, accepted by " in (copied.latest.path / "report.html").read_text()
    assert copied.pipe("accept").stdout == "nothing to accept: every step is current\n"
    copied.replace("pipe.yaml", "lr: 0.02", "lr: 0.03")
    assert copied.plan()["train"] == ("run", "train.lr 0.02 → 0.03")
