from __future__ import annotations

import json
import resource
import subprocess
from pathlib import Path

import pytest

from pipeline.contract.run import STEPS, Run, all_runs

from .project_folder import PIPE, ProjectFolder, environment


@pytest.fixture
def first(finished: ProjectFolder) -> Run:
    """The finished run of the whole pipeline."""
    return all_runs(finished.runs)[-1]


def test_every_step_is_done_and_leaves_no_partial_output(first: Run) -> None:
    assert {name: record.status for name, record in first.read().steps.items()} == dict.fromkeys(STEPS, "done")
    assert list(first.path.glob("*.partial")) == []
    assert (first.path / "report.html").is_file()


def test_verify_confirms_the_chain_of_digests(finished: ProjectFolder, first: Run) -> None:
    checked = finished.pipe("verify", first.id).stdout
    assert "the verdict is about this checkpoint" in checked
    assert "the bundle descends from this data, this checkpoint and this verdict" in checked
    assert "golden requests are answered as at export" in checked
    assert f"bundle {first.bundle().digest[:12]}" in finished.pipe("verify", str(first.bundle_path)).stdout


def test_predict_requests_the_live_service(finished: ProjectFolder, tmp_path: Path) -> None:
    question = tmp_path / "question.json"
    question.write_text("[[0.0, 0.9]]")
    assert json.loads(finished.pipe("predict", str(question)).stdout)["predictions"][0]["side"] == 1
    assert len(json.loads(finished.pipe("predict").stdout)["predictions"]) == 2, "all examples"
    question.write_text("[[0.0]]")
    assert "must be a list of 2 numbers" in finished.pipe("predict", str(question), expect=2).stderr


def processor_seconds_of(project: ProjectFolder, *words: str) -> float:
    """Run a command and return the CPU time of its processes."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    project.pipe(*words)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_unchanged_rerun_reuses_all_steps_but_deploy(copied: ProjectFolder, first: Run) -> None:
    stderr = copied.pipe("run", "all").stderr
    assert f"export: reused, unchanged since {first.id}" in stderr
    steps = copied.latest.read().steps
    assert {name for name, record in steps.items() if record.reused_from == first.id} == set(STEPS) - {"deploy"}
    assert steps["train"].digest == first.read().steps["train"].digest


@pytest.mark.long
def test_an_unchanged_rerun_takes_the_time_of_five_empty_commands(copied: ProjectFolder) -> None:
    """Two of them are the command and its deploy step; importing torch would take four more."""
    rerun, empty = (
        min(processor_seconds_of(copied, *words) for _ in range(3)) for words in (("run", "all"), ("--version",))
    )
    assert rerun < 5 * empty


@pytest.mark.long
def test_service_does_not_keep_the_output_of_its_command_open(copied: ProjectFolder) -> None:
    """The service must not inherit the pipe, and survives the end of its starter."""
    copied.deploy(copied.latest)
    command = " ".join([*PIPE, "run", "all", "2>&1", "|", "cat"])
    done = subprocess.run(
        ["sh", "-c", command], cwd=copied.folder, env=environment({}), capture_output=True, timeout=300
    )
    assert b"already live" in done.stdout
    assert copied.request("/v2/health/ready")[0] == 200


def test_change_of_an_imported_module_reruns_dependent_steps(copied: ProjectFolder) -> None:
    copied.replace("points.py", '"train": 240', '"train": 216')
    plan = copied.plan()
    assert plan["train"][0] == plan["prepare"][0] == "run"
    assert "points.py changed" in plan["train"][1] or plan["train"][1] == "after prepare"
    assert plan["prepare"][1] == "points.py changed"
    before = copied.latest
    copied.pipe("run", "prepare")
    assert copied.latest.read().steps["prepare"].reason == "points.py changed"
    rows = json.loads(copied.pipe("compare", before.id, "-o", "json").stdout)["differences"]
    assert {"step": "check", "part": "source:points.py"}.items() <= next(
        row for row in rows if row["part"].startswith("source")
    ).items()


@pytest.mark.long
def test_damaged_output_is_recreated_with_the_same_bytes(copied: ProjectFolder) -> None:
    before = copied.latest
    path = before.output("prepare") / "data.json"
    good = path.read_bytes()
    path.write_bytes(good.replace(b"0", b"1", 1))
    assert copied.plan()["prepare"] == ("run", f"the output prepare/data.json of run {before.id} changed on disk")
    copied.pipe("run", "--until", "train")
    assert (copied.latest.output("prepare") / "data.json").read_bytes() == good
    assert copied.latest.read().steps["train"].reused_from, "the same input again: train need not run"


@pytest.mark.long
def test_repro_of_a_run_gives_the_same_bits(copied: ProjectFolder) -> None:
    found = json.loads(copied.pipe("repro", "-o", "json").stdout)
    assert {row["file"]: row["equal"] for row in found["files"]} == {
        "train/model.safetensors": True,
        "evaluate/verdict.json": True,
        "export/bundle/model.onnx": True,
    }
