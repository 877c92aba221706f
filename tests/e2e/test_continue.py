"""`pipe run --continue` trains on from an earlier run's checkpoint, with other settings, in a new run."""

from __future__ import annotations

import re
import signal

import pytest

from .project_folder import ProjectFolder, wait_for

CONSTANT = ("train.schedule=constant", "train.warmup_ratio=0")
TRAIN = ("run", "train", "train.processes=1", *CONSTANT, "train.checkpoint_every=7")


def checkpoints(project: ProjectFolder) -> list[int]:
    return sorted(int(path.name[5:]) for path in (project.latest.output("train") / "checkpoints").glob("step-*"))


def newest(project: ProjectFolder) -> int:
    """Return the step of the newest complete checkpoint of a training that goes on."""
    return max((int(path.parent.name[5:]) for path in project.checkpoints.glob("step-*/manifest.json")), default=0)


@pytest.mark.long
def test_continued_training_equals_one_of_full_length(copied: ProjectFolder) -> None:
    copied.pipe(*TRAIN, "train.epochs=2")
    source, kept = copied.latest, checkpoints(copied)
    stderr = copied.pipe("run", "train", "--continue", source.id, "train.epochs=3").stderr
    continued, weights = copied.latest, copied.weights
    assert f"continuing the training of run {source.id} from its checkpoint of step {kept[-1]}" in stderr
    assert re.search(rf"resumed from the checkpoint of step {kept[-1]} of \d+", continued.log("train").read_text())
    assert continued.read().starting_point.startswith(f"{source.id} step {kept[-1]} ")
    assert "3 epochs, every one of 240 samples exactly once in each" in copied.pipe("verify", continued.id).stdout
    assert sorted(int(path.name[5:]) for path in (source.output("train") / "checkpoints").iterdir()) == kept
    assert copied.plan(*TRAIN[1:], "train.epochs=3")["train"][0] == "run", "another training than from the beginning"
    copied.pipe(*TRAIN, "train.epochs=3")
    assert copied.weights == weights


@pytest.mark.long  # test_changes.py has changes that are accepted
def test_continue_with_a_lower_rate_can_be_resumed(copied: ProjectFolder) -> None:
    known = copied.latest.id
    with copied.paused_training(57, *TRAIN, "--force", "train") as pipe:
        wait_for(lambda: copied.latest.id != known)
        wait_for(lambda: newest(copied) >= 50)
        pipe.send_signal(signal.SIGTERM)
        pipe.communicate(timeout=300)
    source = copied.latest
    words = ("run", "train", "--continue", f"{source.id}@50", "train.lr=0.0001")
    with copied.paused_training(70, *words) as pipe:
        wait_for(lambda: copied.latest.id != source.id)
        wait_for(lambda: newest(copied) >= 63)
        pipe.send_signal(signal.SIGTERM)
        pipe.communicate(timeout=300)
    continued = copied.latest
    found = re.match(rf"{source.id} step (\d+) ", continued.read().starting_point)
    assert found is not None
    assert int(found[1]) <= 50
    copied.pipe("run", "--resume", continued.id)
    assert "exactly once" in copied.pipe("verify", continued.id).stdout
    assert continued.config.train.lr == 0.0001
    report = (continued.path / "report.html").read_text()
    assert f"continues run {source.id} step {found[1]}" in report


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--continue", "latest"), "nothing changes; name settings, such as train.epochs=20"),
        (
            ("--continue", "latest", "train.batch_size=8"),
            "train.batch_size: the checkpoint is of another order of samp",
        ),
        (("--continue", "latest", "model.rank=4"), "model.rank: the checkpoint is of another model; `pipe run model."),
        (("--continue", "latest@1", "train.lr=0.1"), r"has no checkpoint so early; there are steps \d+"),
        (("--continue", "latest@last", "train.lr=0.1"), "write the step as a number, as in latest@300"),
        (("--continue", "latest", "--resume", "latest"), "--resume and --continue: a run follows one other"),
    ],
)
def test_continue_with_incompatible_settings_is_refused(
    words: tuple[str, ...], message: str, finished: ProjectFolder
) -> None:
    assert re.search(message, finished.pipe("run", *words, expect=2).stderr)


def test_resume_with_another_setting_suggests_continue(finished: ProjectFolder) -> None:
    stderr = finished.pipe("run", "--resume", run := finished.latest.id, "train.epochs=20", expect=2).stderr
    assert (
        f"`pipe run --continue {run} train.epochs=20` starts a new one from its checkpoint, and `pipe run t" in stderr
    )
