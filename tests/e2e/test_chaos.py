from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest

from pipeline.chaos import campaign
from pipeline.history import find_project, load_history, unreadable_runs
from pipeline.system.files import read_object

from .project_folder import PIPE, ProjectFolder, environment, wait_for

# A task whose loss depends on the number of steps of its process, which no checkpoint restores.
STATEFUL = (
    'return functional.cross_entropy(outputs, batch["label"])',
    'return functional.cross_entropy(outputs, batch["label"]) * (1 + self.steps / 100)',
)
# A batch order that is one step behind after a resume.
BEHIND = (
    "class Sides:",
    """from train.batch_order import BatchOrder

batch_of = BatchOrder.batch
if list(Path.cwd().glob("runs/chaos/*/*/train.partial/ledger.jsonl")):
    BatchOrder.batch = lambda order, step: batch_of(order, max(0, step - 1))


class Sides:""",
)


@pytest.fixture
def project(tmp_path: Path) -> ProjectFolder:
    return ProjectFolder.create(tmp_path / "sides")


@pytest.mark.long
def test_training_survives_every_kind_of_kill(project: ProjectFolder) -> None:
    done = project.pipe("chaos", "--kills", "32", "--seed", "7", "-o", "json", seconds=1500)
    found = json.loads(done.stdout)
    assert found["held"], found["verdict"]
    assert (found["kills"], found["lost"], found["repeated"], found["equal"]) == (32, 0, 0, True)
    assert len(found["places"]) == 22, "eleven places of kills, and eleven other faults"
    assert all(place["recoveries"] == place["kills"] for place in found["places"])
    missing = 32 - done.stderr.count("kill ")
    assert 0 <= missing <= len(found["trainings"]), "a line for each, except a training's last if no step follows it"
    assert list((project.runs / "chaos").iterdir()) == []


@pytest.mark.long
def test_task_with_hidden_state_is_detected_and_its_files_are_kept(project: ProjectFolder) -> None:
    project.replace("task.py", *STATEFUL)
    done = project.pipe("chaos", "train.processes=1", "--kills", "1", "--seed", "7", expect=1, seconds=300)
    assert "final weights     DIFFERENT" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("did NOT hold: training differs from the reference from step ")
    kept = next(line.split(maxsplit=1)[1] for line in done.stdout.splitlines() if line.startswith("run "))
    assert (Path(kept) / "train" / "ledger.jsonl").is_file()
    assert f"pipe verify {kept}; pipe logs train --run {kept}" in done.stdout


@pytest.mark.long
def test_samples_lost_and_repeated_by_a_broken_resume_are_counted(project: ProjectFolder) -> None:
    project.replace("task.py", *BEHIND)
    done = project.pipe(
        "chaos", "train.processes=1", "--kills", "2", "--seed", "7", "-o", "json", expect=1, seconds=300
    )
    found = json.loads(done.stdout)
    assert found["lost"] > 0
    assert found["repeated"] > 0
    assert f"{found['lost']} samples were lost and {found['repeated']} repeated" in found["verdict"]


# With this sign, training makes every validation worse than the one before: the first epoch ends with the best.
WORSE = (STATEFUL[0], f"{STATEFUL[0]} * (1 if torch.is_grad_enabled() else -1)")


@pytest.mark.long
def test_training_survives_faults_of_storage(project: ProjectFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """All processes are killed, storage is damaged, and training is resumed: several times for a file at random."""
    project.replace("task.py", *WORSE)
    chaos = campaign.Campaign.begin(find_project(project.folder), project.folder, print)
    prepared = chaos.prepare(chaos.project.config())
    reference = chaos.train_reference(prepared, chaos.reduced_config(prepared, 1, ["train.processes=1"]))
    best = read_object(reference.run.output("train") / "summary.json", "best_step")
    for fault, kills in (("best", 1), ("zeroed", 4), ("unreadable", 1)):
        monkeypatch.setattr(campaign, "KILL_KINDS", (fault,))
        (training,) = chaos.train_with_kills(prepared, reference, kills, seed=7)
        assert training.held, training
        assert len(training.made) == kills
        summary = read_object(Path(training.run) / "train" / "summary.json")
        lost = summary["lost_best"]["step"] if fault == "best" else 0
        assert (lost, training.lost_best) == ((best, best) if fault == "best" else (0, 0)), "the summary names it"
        assert (summary["best_step"] == best) == (fault != "best"), "a later step instead"
        assert not Path(training.run, "train.partial").exists()
    assert len(unreadable_runs(chaos.folder, load_history(chaos.folder))) == 1


def test_killed_chaos_command_leaves_no_process(project: ProjectFolder) -> None:
    chaos = psutil.Popen(
        [*PIPE, "chaos", "--kills", "1"], cwd=project.folder, env=environment({}), stderr=-3, stdout=-3
    )
    wait_for(lambda: list(project.runs.glob("chaos/*/*/logs/*.log")))
    started = chaos.children(recursive=True)
    chaos.kill()
    chaos.wait(300)
    _, alive = psutil.wait_procs(started, timeout=300)
    assert started
    assert alive == []


# A loader that gives each batch the rows after those of the batch order.
NEXT_ROWS = (
    "class Sides:",
    """from train.data import BatchLoader

pick = BatchLoader._pick


def pick_next(self, columns, rows):
    return pick(self, columns, (rows + 1) % len(columns["label"]))._replace(indices=rows)


BatchLoader._pick = pick_next


class Sides:""",
)


@pytest.mark.long
def test_wrong_batches_are_detected_by_verify_and_chaos(project: ProjectFolder) -> None:
    project.replace("task.py", *NEXT_ROWS)
    wrong = "line 1: step 1 was given samples with other contents than those that prepare read"
    project.pipe("run", "train")
    assert wrong in project.pipe("verify", expect=2).stderr
    done = project.pipe("chaos", "train.processes=1", "--kills", "1", "--seed", "7", expect=1, seconds=300)
    assert wrong in done.stdout.splitlines()[-1]
