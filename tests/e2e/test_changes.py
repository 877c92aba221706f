"""What changed since an interrupted training began: nothing is trained again, or thrown away, without a decision."""

from __future__ import annotations

import json
import re
import signal

from pipeline.contract.run import all_runs

from .project_folder import ProjectFolder, wait_for

HELD_AFTER = 57  # there are checkpoints of steps 25 and 50
RESUMED = re.compile(r"resumed from the checkpoint of step 5\d of 120")
TRAIN = ("run", "train", "--force", "train", "train.processes=1")


def interrupt(project: ProjectFolder) -> str:
    """Interrupt a training that has checkpoints; return its run's id."""
    known = project.latest.id
    with project.paused_training(HELD_AFTER, *TRAIN) as pipe:
        wait_for(lambda: project.latest.id != known)
        wait_for((project.checkpoints / "step-00000050" / "manifest.json").exists)
        pipe.send_signal(signal.SIGTERM)
        pipe.communicate(timeout=300)
    return project.latest.id


def test_changes_since_an_interrupted_training_are_listed_and_then_accepted(copied: ProjectFolder) -> None:
    run_id = interrupt(copied)
    checkpoints = sorted(path.name for path in copied.checkpoints.iterdir())
    copied.replace("task.py", "functional.cross_entropy(", "2 * functional.cross_entropy(")
    stderr = copied.pipe("run", "--resume", expect=2).stderr
    assert f"error: since the training of run {run_id} began, this changed: task.py changed; " in stderr
    assert f"`pipe run --resume {run_id} --accept-changes`" in stderr
    assert sorted(path.name for path in copied.checkpoints.iterdir()) == checkpoints

    assert RESUMED.search(copied.pipe("run", "--resume", "--accept-changes").stderr)
    (acceptance,) = copied.latest.read().steps["train"].accepted
    assert acceptance.changes == "task.py changed"
    assert copied.plan("train", "train.processes=1")["train"][0] == "reuse"


def test_a_restarted_training_keeps_the_earlier_checkpoints_until_it_is_complete(copied: ProjectFolder) -> None:
    run_id = interrupt(copied)
    copied.replace("task.py", "functional.cross_entropy(", "2 * functional.cross_entropy(")
    replaced = copied.latest.path / "train.replaced-1" / "checkpoints" / "step-00000050" / "manifest.json"
    with copied.paused_training(3, "run", "--resume", "--restart") as pipe:
        wait_for(replaced.exists)
        pipe.send_signal(signal.SIGTERM)
        pipe.communicate(timeout=300)
    assert replaced.exists()
    assert copied.latest.id == run_id
    copied.pipe("run", "--resume")
    assert not replaced.parents[2].exists()


def test_a_comment_changes_nothing(copied: ProjectFolder) -> None:
    interrupt(copied)
    with (copied.folder / "task.py").open("a") as file:
        file.write("# a comment\n")
    assert RESUMED.search(copied.pipe("run", "--resume").stderr)


def test_another_champion_does_not_stop_a_resumed_training(copied: ProjectFolder) -> None:
    interrupt(copied)
    copied.pipe("registry", "promote", all_runs(copied.runs)[1].id)
    with copied.paused_training(HELD_AFTER, "run", "--resume") as pipe:
        wait_for(lambda: RESUMED.search(copied.latest.log("train").read_text()))
        pipe.send_signal(signal.SIGTERM)
        pipe.communicate(timeout=300)


def test_accepted_outputs_are_reused(copied: ProjectFolder) -> None:
    copied.replace("task.py", "functional.cross_entropy(", "1 * functional.cross_entropy(")
    assert copied.plan()["train"] == ("run", "after prepare")
    assert copied.pipe("run", "--from", "evaluate", expect=2).stderr.endswith("has to run: task.py changed\n")
    accepted = json.loads(copied.pipe("accept", "-o", "json").stdout)
    assert [row["step"] for row in accepted] == ["prepare", "train", "evaluate", "export"]
    assert {step: action for step, (action, _) in copied.plan().items() if step != "deploy"} == dict.fromkeys(
        ("prepare", "train", "evaluate", "export", "package"), "reuse"
    )
    copied.pipe("report")
    assert "train: task.py changed, accepted by " in (copied.latest.path / "report.html").read_text()
    assert copied.pipe("accept").stdout == "nothing to accept: every step is current\n"
    copied.replace("pipe.yaml", "lr: 0.02", "lr: 0.03")
    assert copied.plan()["train"] == ("run", "train.lr 0.02 → 0.03")
