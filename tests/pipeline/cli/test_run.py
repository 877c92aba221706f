from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pipeline.cli import app
from pipeline.contract.config import Config
from pipeline.contract.run import STEPS, Run, StepRecord
from pipeline.display import Display
from pipeline.history import Project, create_run, find_project, find_run, write_record
from pipeline.plan import Decision
from pipeline.system.errors import ConfigError, install_command

from .conftest import Pipe

IMAGE = f"registry/tiny@sha256:{'5' * 64}"


def complaint(pipe: Pipe, *words: str) -> str:
    """Return the one-line error of a command that exits with 2 and prints nothing on standard output."""
    done = pipe(*words, expect=2)
    lines = done.stderr.splitlines()
    assert done.stdout == ""
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    return lines[0]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("run train.epoch=3", "unknown setting `train.epoch`; did you mean `train.epochs`?"),
        ("plan train.epoch=3", "unknown setting `train.epoch`; did you mean `train.epochs`?"),
        ("run task=task.py:Other", "task.py has no class Other"),
        ("run train.nodes=2", "train.nodes=2 needs train.rendezvous=HOST:PORT"),
        ("run trian", "no step 'trian'; there are check, prepare, train, evaluate"),
        (
            "plan deploy train.lr=1",
            "train.lr=1: a deployment may change only deploy.*, monitor.*, package.*, rollout.* and ",
        ),
        ("plan --from trian", "no step 'trian'; there are check, prepare, train, evaluate"),
        ("run --force trian", "--force trian: no such step"),
        ("run --resume", "nothing to resume"),
        ("deploy", "has a bundle yet"),
        ("serve", "has a bundle yet"),
        ("registry promote", "has a bundle yet"),
        ("registry rollback", "there is no previous champion to roll back to"),
        ("predict", "no service is live here"),
    ],
)
def test_mistake_is_a_one_line_error_and_creates_no_run(pipe: Pipe, starter: Path, words: str, message: str) -> None:
    assert message in complaint(pipe, *words.split())
    assert [path.name for path in starter.glob("runs/*") if path.is_dir()] == []


@pytest.mark.parametrize("command", ["run", "plan"])
def test_project_files_with_names_of_other_modules_are_errors(pipe: Pipe, starter: Path, command: str) -> None:
    for name in ("torch", "sklearn", "numpy", "utils"):
        (starter / f"{name}.py").write_text("x = 1\n")
    message = complaint(pipe, command)
    assert "task.py imports `load_wine` from `sklearn.datasets`" in message
    assert message.endswith("to fix it: rename the project's `numpy`, `torch`, `sklearn`")


def test_a_plan_states_what_would_run_and_changes_nothing(pipe: Pipe, starter: Path) -> None:
    rows = json.loads(pipe("plan", "-o", "json").stdout)
    assert [(row["name"], row["action"], row["reason"]) for row in rows[:4]] == [
        ("check", "run", "never run"),
        ("prepare", "run", "never run"),
        ("train", "run", "after prepare"),
        ("evaluate", "run", "after prepare, train"),
    ]
    assert not (starter / "runs").exists()
    assert pipe("run", "--dry-run").stdout == pipe("plan").stdout


def test_a_plan_estimates_the_memory_of_training(pipe_with_estimate: Pipe, starter: Path) -> None:
    (starter / "runs").mkdir()  # an estimate is kept there
    plan = pipe_with_estimate("plan", "-o", "json")
    train = next(row for row in json.loads(plan.stdout) if row["name"] == "train")
    kinds = ("weights", "gradients", "optimizer", "activations")
    assert train["memory"]["bytes"] == sum(train["memory"][kind] for kind in kinds) > 0
    assert pipe_with_estimate("plan").stdout.splitlines()[-1].startswith("memory: ")
    assert "memory" not in pipe_with_estimate("plan", "prepare").stdout


@pytest.mark.long
def test_plan_works_without_a_memory_estimate(pipe_with_estimate: Pipe, starter: Path) -> None:
    task = starter / "task.py"
    lines = task.read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("    def loss("))
    task.write_text("\n".join([*lines[: first + 1], "        float(outputs.sum())", *lines[first + 1 :]]))
    done = pipe_with_estimate("plan")
    assert "memory" not in done.stdout
    reason = "it depends on the values of tensors: "
    assert f"note: the memory of training cannot be estimated: {reason}" in done.stderr
    assert f"(task.py, line {first + 2})" in done.stderr


def test_run_since_another_reads_the_data_anew(pipe: Pipe, starter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = starter / "task.py"
    task.write_text(task.read_text().replace("[split]", "[split][: int(__import__('os').environ['SAMPLES'])]"))
    for samples in ("30", "35"):
        monkeypatch.setenv("SAMPLES", samples)
        pipe("run", "prepare", "train.epochs=3", "prepare.columns=off")
    printed = pipe("run", "prepare", "--since", "latest", "train.lr=0.5").stderr
    first, second, third = (
        json.loads(path.read_text())
        for path in sorted((starter / "runs").glob("*/run.json"), key=lambda path: path.stat().st_mtime_ns)
    )
    assert f"reading the data anew, with the settings of run {second['id']}" in printed
    assert second["steps"]["prepare"]["reused_from"] == first["id"]
    assert not third["steps"]["prepare"].get("reused_from")
    config = find_run(starter / "runs", "latest").config
    assert (config.train.epochs, config.train.lr) == (3, 0.5)


def test_plan_of_a_step_includes_its_prerequisites_and_has_an_exit_code(pipe: Pipe) -> None:
    rows = json.loads(pipe("plan", "evaluate", "--exit-code", "-o", "json", expect=4).stdout)
    assert [row["name"] for row in rows] == ["check", "prepare", "train", "evaluate"]
    pipe("plan", expect=0)


def test_the_training_job_is_rendered_without_running_anything(pipe: Pipe, starter: Path) -> None:
    assert "train.image is empty" in complaint(pipe, "run", "train", "--render")
    assert "name it by digest" in complaint(pipe, "run", "train", "--render", "train.image=registry/tiny:1")
    paths = json.loads(pipe("run", "train", "--render", "out", f"train.image={IMAGE}", "-o", "json").stdout)
    assert paths
    assert all((starter / path).is_file() for path in paths)
    assert IMAGE in "".join((starter / path).read_text() for path in paths)


@pytest.mark.parametrize(("engine", "name"), [("argo", "workflow.yaml"), ("kfp", "pipeline.yaml")])
def test_pipeline_is_written_as_a_workflow_reproducibly(engine: str, name: str, starter: Path) -> None:
    def write(folder: str, *overrides: str) -> list[Path]:
        words = ("--workflow", engine, "--render", str(starter / folder), f"train.image={IMAGE}", *overrides)
        done = CliRunner().invoke(app, ["-C", str(starter), "plan", *words, "-o", "json"])
        assert done.exit_code == 0, done.output
        return [Path(path) for path in json.loads(done.stdout)]

    assert write("a") == [starter / "a" / "claim.yaml", starter / "a" / name]
    write("b")
    assert [path.name for path in write("c", "cluster.volume_claim=shared")] == [name]
    first, second = ((starter / folder / name).read_bytes() for folder in ("a", "b"))
    assert first == second
    assert IMAGE.encode() in first


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--workflow", "argo"), "train.image is empty"),
        (("--workflow", "argo", "train"), "--workflow: writes all steps; remove train"),
        (("--workflow", "argo", "train.image=a:latest"), "`latest` means another image every day"),
        (("--render", "out"), "--render: needs --workflow"),
    ],
)
def test_workflow_that_cannot_be_written_is_an_error(words: tuple[str, ...], message: str, starter: Path) -> None:
    done = CliRunner().invoke(app, ["-C", str(starter), "plan", *words])
    assert isinstance(done.exception, ConfigError)
    assert message in str(done.exception)


def test_missing_extra_is_named_with_its_install_command(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kubernetes", None)  # as if it were not installed
    error = pipe("run", "prepare", "--executor", "kubernetes", f"train.image={IMAGE}", expect=2).stderr
    expected = f"the module `kubernetes` is not installed; to fix it: {install_command('cluster')}"
    assert expected in error.splitlines()[-1]
    assert "Traceback" not in error


def test_a_long_training_is_replaced_only_after_a_confirmation(
    pipe: Pipe, starter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = find_project(starter)
    run = create_run(project.runs, project.config(), ("prepare", "train"), parent="")
    write_record(run, StepRecord(step="train", status="done", key="other", parts={}, seconds=700.0))
    rows = {row["name"]: row["reason"] for row in json.loads(pipe("plan", "train", "-o", "json").stdout)}
    assert rows["train"].endswith("; the last training took 11 min 40 s")
    monkeypatch.setattr(Display, "ask", lambda *_: False)
    assert "nothing was run; `pipe accept`" in pipe("run", "train", expect=2).stderr
    assert [path.name for path in project.runs.iterdir() if path.is_dir()] == [run.id]


def test_plan_of_a_deployment_prints_what_would_change(
    pipe: Pipe, starter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`pipe plan deploy` compares with what serves, once everything before the deployment is complete."""
    changes = [{"object": "deployment/digits", "new": False, "fields": ["spec.replicas: 2 → 3"]}]
    steps = tuple(Decision(name, "reuse", "unchanged", "key", {}, "first") for name in STEPS[:-1])
    steps += (Decision("deploy", "run", "always", "key", {}),)
    compared: list[str] = []

    def preview(project: Project, source: Run, config: Config, report: object) -> list[dict[str, object]]:
        compared.append(f"{source.id} {config.deploy.namespace}")
        return changes

    monkeypatch.setattr("pipeline.steps.deploy.preview", preview)
    monkeypatch.setattr("pipeline.cli.run.find_run", lambda runs, name: Run(runs / name))
    waiting = pipe("plan", "deploy")
    assert "known once package is complete; `pipe deploy --dry-run` compares the newest bundle" in waiting.stderr
    assert compared == []
    monkeypatch.setattr("pipeline.cli.run.Work.preview", lambda self: steps)
    words = ("deploy.target=kubernetes", "deploy.namespace=models")
    done = pipe("plan", "deploy", *words, "--exit-code", expect=4)
    assert done.stdout.endswith("deployment/digits: spec.replicas: 2 → 3\n")
    assert compared == ["first models"]
    assert json.loads(pipe("plan", "deploy", "-o", "json").stdout)[-1]["changes"] == changes
    assert "changes" not in json.loads(pipe("plan", "all", "-o", "json").stdout)[-1]
    changes.clear()
    assert pipe("plan", "deploy", "--exit-code").stdout.endswith("nothing would change\n")


def test_preview_of_a_deployment_with_package_settings_names_the_new_image(
    pipe: Pipe, starter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = find_project(starter)
    run = create_run(project.runs, project.config(), ("export", "package"), parent="")
    monkeypatch.setattr("pipeline.cli.run._find_deployable", lambda *_: run)
    done = pipe("deploy", "--dry-run", "--exit-code", "package.image=r.example/m", expect=4)
    assert done.stdout == "image: new; what follows depends on it\n"
