from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from pipeline.cli import complete_arguments
from pipeline.cli.app import COMMANDS

from .conftest import Pipe


def test_help_lists_every_command_in_order(pipe: Pipe) -> None:
    text = pipe("-h").stdout
    listed = re.findall(r"^  ([a-z]+) {2,}\S", text.partition("Start:")[2], re.MULTILINE)
    assert listed == COMMANDS
    assert "Exit codes: 0 done, 1 failed, 2 usage or configuration" in text


@pytest.mark.parametrize("words", [["status", "extra"], ["plan", "train.lrr=1"], ["explain", "lr"], ["rum"]])
def test_errors_are_json_with_json_output(pipe: Pipe, words: list[str]) -> None:
    done = pipe(*words, "-o", "json", expect=2)
    error = json.loads(done.stdout)
    assert done.stderr == f"error: {error['error']}\n"
    assert (error["kind"], error["exit_code"]) == ("ConfigError", 2)


@pytest.mark.parametrize(
    ("typed", "completions"),
    [
        ("pipe run ev", ["evaluate", "evaluate.metric=", "evaluate.rule="]),
        ("pipe plan train.lr", ["train.lr="]),
        ("pipe explain train.sch", ["train.schedule"]),
        ("pipe run train.optimizer=", ["train.optimizer=adamw"]),
        ("pipe run train.deterministic=f", ["train.deterministic=false"]),
        ("pipe report la", ["latest"]),
        ("pipe acc", ["accept"]),
        ("pipe logs ", ["export", "service", "train"]),
        ("pipe logs --run 2025 ", ["prepare", "service"]),
    ],
)
def test_commands_steps_settings_and_runs_are_completed(
    starter: Path, monkeypatch: pytest.MonkeyPatch, typed: str, completions: list[str]
) -> None:
    for log in (
        "20260101-000000-0000/logs/train",
        "20260101-000000-0000/logs/export",
        "20250101-000000-0000/logs/prepare",
    ):
        path = starter / "runs" / f"{log}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        (path.parents[1] / "run.json").touch()
    words = typed.split(" ")
    variables = {"_PIPE_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(len(words) - 1)}
    done = subprocess.run(
        [sys.executable, "-m", "pipeline"], env={**os.environ, **variables}, cwd=starter, capture_output=True, text=True
    )
    assert done.stdout.splitlines()[: len(completions)] == completions, done.stderr


def test_explain_shows_a_setting_or_all_of_a_section(pipe: Pipe) -> None:
    facts = json.loads(pipe("explain", "train.schedule", "-o", "json").stdout)
    assert (facts["type"], facts["default"]) == ("cosine | linear | constant | wsd", "cosine")
    assert facts["reruns"] == "train and what depends on it"
    assert json.loads(pipe("explain", "train.workers", "-o", "json").stdout)["reruns"] == "nothing"
    assert "did you mean train.lr?" in pipe("explain", "train.lrr", expect=2).stderr
    assert "did you mean train.lr?" in pipe("explain", "lr", expect=2).stderr
    names = [facts["setting"] for facts in json.loads(pipe("explain", "tune", "-o", "json").stdout)]
    assert names[0] == "tune.metric" and all(name.startswith("tune.") for name in names)
    assert pipe("explain", "tune").stdout.startswith("tune: ")


SLOW_MODULES = {"jinja2", "kubernetes", "numpy", "onnx", "onnxruntime", "optuna", "psutil", "rich", "torch"}


@pytest.mark.parametrize("words", [["--help"], ["plan"]])
def test_help_and_plan_load_no_slow_modules(starter: Path, words: list[str]) -> None:
    code = (
        "import sys\nfrom pipeline.cli import main\n"
        "try:\n    main()\nfinally:\n    print(*sys.modules, file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, *words], cwd=starter, capture_output=True, text=True, check=True)
    loaded = {name.partition(".")[0] for name in done.stderr.split()}
    assert "typer" in loaded
    assert not loaded & SLOW_MODULES


@pytest.mark.parametrize("words", [["run"], ["registry", "promote"], ["gate", "explain"], ["serve"]])
def test_short_help_option_works_for_every_command(pipe: Pipe, words: list[str]) -> None:
    assert pipe(*words, "-h").stdout.startswith("Usage: ")
    assert pipe(expect=2).stderr.startswith("Usage: pipe")


def test_version_is_that_of_the_distribution(pipe: Pipe) -> None:
    assert pipe("--version").stdout == f"pipe {metadata.version('pipe-road')}\n"


def test_unknown_command_and_invalid_option_are_usage_errors(pipe: Pipe) -> None:
    assert pipe("rum", expect=2).stderr == "error: No such command 'rum'. Did you mean 'run'; see `pipe --help`\n"
    stderr = pipe("gc", "--keep", "0", expect=2).stderr
    assert stderr.startswith("error: Invalid value for '--keep'") and stderr.count("\n") == 1


def test_read_only_commands_create_nothing(pipe: Pipe, starter: Path) -> None:
    before = sorted(starter.iterdir())
    for command in ("status", "stop", "gc", "plan"):
        pipe(command)
    assert sorted(starter.iterdir()) == before


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        (["run", "--resume"], ["run", "--resume", "latest"]),
        (["run", "--resume", "2026"], ["run", "--resume", "2026"]),
        (["run", "--resume", "runs/20260101-000000-aaaa"], ["run", "--resume", "runs/20260101-000000-aaaa"]),
        (["run", "--resume", "train"], ["run", "--resume", "latest", "train"]),
        (["run", "--resume", "package.base_image=a/b"], ["run", "--resume", "latest", "package.base_image=a/b"]),
        (["run", "--resume", "-o", "json"], ["run", "--resume", "latest", "-o", "json"]),
        (["run", "train", "--render"], ["run", "train", "--render", "default"]),
        (["run", "--render", "folder"], ["run", "--render", "folder"]),
        (["run", "--render", "train.image=x"], ["run", "--render", "default", "train.image=x"]),
        (["deploy", "--render", "-o", "json"], ["deploy", "--render", "default", "-o", "json"]),
        (["plan", "train", "-C", "here"], ["-C", "here", "plan", "train"]),
        (["run", "--project=here", "--resume"], ["--project=here", "run", "--resume", "latest"]),
        (["serve", "--", "-C", "x"], ["serve", "--", "-C", "x"]),
    ],
)
def test_option_without_value_gets_its_default(typed: list[str], meant: list[str]) -> None:
    assert complete_arguments(typed) == meant


def test_project_option_selects_the_folder(pipe: Pipe, starter: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    assert pipe("-C", str(starter), "plan", here=tmp_path / "elsewhere").stdout == pipe("plan").stdout
    assert list((tmp_path / "elsewhere").iterdir()) == []
    missing = tmp_path / "missing"
    assert pipe("plan", "-C", str(missing), expect=2).stderr.startswith(f"error: {missing}: no such folder")


def test_file_in_place_of_the_runs_folder_is_named(pipe: Pipe, starter: Path) -> None:
    (starter / "runs").touch()
    stderr = pipe("run", expect=2).stderr
    assert stderr == f"error: {starter / 'runs'}: is a file, but must be the folder of runs; move it away\n"


@pytest.mark.parametrize(("signal_name", "status"), [("SIGTERM", 143), ("SIGINT", 130), ("SIGHUP", 130)])
@pytest.mark.parametrize("handled", [True, False])
def test_the_exit_code_distinguishes_sigterm_from_ctrl_c(signal_name: str, status: int, handled: bool) -> None:
    code = (
        "import os, signal\nimport pipeline.cli as cli\nfrom pipeline.system.errors import Interrupted\n"
        "@cli.app.command()\ndef waste() -> None:\n"
        f"    try:\n        os.kill(os.getpid(), signal.{signal_name})\n        signal.pause()\n"
        "    except KeyboardInterrupt:\n"
        f"        {'raise Interrupted(str()) from None' if handled else 'raise'}\n"
        "cli.main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code, "waste"], capture_output=True, text=True, check=False)
    assert (done.returncode, "Traceback" in done.stderr) == (status, False), done.stderr
