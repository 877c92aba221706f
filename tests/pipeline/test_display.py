from __future__ import annotations

import io
import json
import os
import pty
import re
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipeline.contract.restarts import Event
from pipeline.contract.run import Run
from pipeline.display import Display, StepRate, begins_error, describe_metrics, describe_start, last_metrics, step_tail
from pipeline.system.errors import ConfigError, DataError, GateError, PipelineError, StageError

from .terminal import Terminal

LINE = {"step": 20, "epoch": 1, "loss": 0.5, "samples_per_second": 12345.6}
NOISE = "W0102 03:04:05.678 12 torch/distributed/run.py:1] one thing"
PROFILER = "USDT:2026-01-02 03:04:05 12:12 SyncActivityProfilerHandler.cpp:52] profiler_start"
TRACEBACK = "Traceback (most recent call last):\n  File x\nValueError\n"
ABORTS = "terminate called after throwing an instance of 'gloo::EnforceNotMet'\n  what():  [enforce fail at pair.cc]\n"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"{NOISE}\nepoch 1\n{TRACEBACK}", ["train | epoch 1"]),
        (f"epoch 1\n{PROFILER}\nepoch 2\n", ["train | epoch 1", "train | epoch 2"]),
        (f"{ABORTS}error: no\nValueError: why\n", []),
    ],
)
def test_messages_of_launcher_and_torch_stay_in_the_log(
    text: str, shown: list[str], run: Run, display: Display, capsys: pytest.CaptureFixture[str]
) -> None:
    run.log("train").write_text(text)
    display.tick()
    assert printed_lines(capsys) == shown


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = Run(tmp_path / "20260101-000000-aaaa")
    run.log("train").parent.mkdir(parents=True)
    return run


@pytest.fixture
def display(run: Run, capsys: pytest.CaptureFixture[str]) -> Display:
    display = Display(live=False)
    display.start(run, "train", "never run")
    capsys.readouterr()
    return display


def printed_lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return the lines on standard error without their times; standard output must be empty."""
    captured = capsys.readouterr()
    assert captured.out == ""
    lines: list[str] = captured.err.splitlines()
    return [re.sub(r"^\d\d:\d\d:\d\d ", "", line) for line in lines]


def test_plain_lines_have_the_time(capsys: pytest.CaptureFixture[str]) -> None:
    Display(live=False).report("hello")
    assert re.fullmatch(r"\d\d:\d\d:\d\d hello\n", capsys.readouterr().err)


def test_lines_of_a_step_are_shown_with_its_name(
    run: Run, display: Display, capsys: pytest.CaptureFixture[str]
) -> None:
    run.log("train").write_text("epoch 1\nhalf a li")
    display.tick()
    assert printed_lines(capsys) == ["train | epoch 1"]
    run.log("train").write_text("epoch 1\nhalf a line\n")
    display.tick()
    assert printed_lines(capsys) == ["train | half a line"]


def test_lines_of_an_earlier_attempt_are_not_shown_again(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run.log("train").write_text("long ago\n")
    display = Display(live=False)
    display.start(run, "train", "resumed")
    display.tick()
    assert printed_lines(capsys) == ["train: resumed"]


def test_progress_of_training_is_a_line_each_minute_without_a_terminal(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = {"now": 0.0}
    fake = SimpleNamespace(monotonic=lambda: clock["now"], strftime=time.strftime)
    monkeypatch.setattr("pipeline.display.time", fake)
    display = Display(live=False)
    display.start(run, "train", "never run", "starting 2 processes")
    capsys.readouterr()
    run.partial("train").mkdir()
    for clock["now"], metrics, shown in (
        (59.0, None, []),
        (60.0, LINE, ["train: epoch 2, step 20, loss 0.5000, 12,346 samples/s"]),
        (119.0, {**LINE, "step": 40}, []),
        (120.0, {**LINE, "step": 40}, ["train: epoch 2, step 40, loss 0.5000, 12,346 samples/s"]),
        (180.0, {**LINE, "step": 40}, []),  # nothing new
    ):
        if metrics:
            (run.partial("train") / "metrics.jsonl").write_text(json.dumps(metrics) + "\n")
        display.tick()
        assert printed_lines(capsys) == shown


def test_failed_step_shows_its_last_lines_and_how_to_continue(
    run: Run, display: Display, capsys: pytest.CaptureFixture[str]
) -> None:
    run.log("train").write_text("epoch 1\nerror: no\nValueError: no\n")
    display.failed(StageError("train: no"))
    assert printed_lines(capsys) == [  # the error itself is printed by the command, once
        "    epoch 1",
        "    ValueError: no",
        f"log: {run.log('train')}",
        f"to continue after fixing it: pipe run --resume {run.id} (if code changed: with --accept-changes)",
    ]


ANEW = "to continue after fixing it: pipe run all (finished steps are reused)"  # so that it reads changed settings


@pytest.mark.parametrize(
    ("step", "error", "last"),
    [
        ("prepare", DataError("set prepare.missing_share=0.05"), ANEW),
        ("train", ConfigError("no"), ANEW),
        ("evaluate", GateError("no"), "log: "),  # there is nothing to resume
    ],
)
def test_user_error_is_shown_without_the_log(
    step: str, error: PipelineError, last: str, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    display = Display(live=False)
    display.start(run, step, "never run")
    run.log(step).write_text("epoch 1\n")
    display.failed(error)
    lines = printed_lines(capsys)
    assert lines[-1].startswith(last)
    assert "    epoch 1" not in lines


def test_tail_has_the_last_lines_of_the_step_without_the_launchers() -> None:
    assert step_tail(["one", "", "two", NOISE, "more noise"]) == ["one", "two"]
    assert step_tail([f"line {i}" for i in range(100)]) == [f"line {i}" for i in range(88, 100)]
    assert step_tail([NOISE]) == [NOISE], "better than nothing"
    assert step_tail(["one", PROFILER, "two"]) == ["one", "two"]
    assert step_tail(["ValueError: mine", *["echo: rank 0 lost contact"] * 20]) == ["ValueError: mine"]


@pytest.mark.parametrize("line", ["Traceback (most recent call last):", "[rank1]: Traceback", "error: no"])
def test_first_line_of_an_error_is_recognized(line: str) -> None:
    assert begins_error(line)
    assert not begins_error(f"epoch 1, {line}")
    assert not begins_error("[rank0]:W1121 08:47:29.557000 31545 torch/_logging/_internal.py:1345] [0/0] ignored")


def test_newest_training_line_is_found_before_other_lines(tmp_path: Path) -> None:
    journal = tmp_path / "metrics.jsonl"
    assert last_metrics(journal) is None
    older = json.dumps(LINE | {"step": 10, "padding": "x" * 5000})
    journal.write_text("\n".join([older, json.dumps(LINE), '{"step": 20, "validation": {"accuracy": 1}}', '{"st']))
    assert last_metrics(journal) == LINE


def test_progress_has_shorter_versions_for_narrow_terminals() -> None:
    assert describe_metrics(LINE, None)[0] == "epoch 2, step 20, loss 0.5000, 12,346 samples/s"
    assert describe_metrics({"step": 1, "epoch": 0, "loss": 2.0}, None)[0] == "epoch 1, step 1, loss 2.000"
    assert describe_metrics({**LINE, "total_steps": 500}, 65.4) == (
        "epoch 2, step 20/500, loss 0.5000, 12,346 samples/s, 1:05 left",
        "epoch 2, step 20/500, loss 0.5000, 1:05 left",
        "step 20/500, loss 0.5000, 1:05 left",
        "loss 0.5000, 1:05 left",
        "1:05 left",
    )


def test_before_the_first_metrics_the_start_of_processes_is_shown() -> None:
    launch = Event(event="launch", attempt=0, time=0.0)
    start = Event(event="start", attempt=1, time=1.0, processes=2)
    step = Event(event="step", attempt=1, time=2.0)
    assert describe_start([], "starting 2 processes") == "starting 2 processes"
    assert describe_start([launch], "starting 2 processes") == "starting 2 processes"
    assert describe_start([launch, start], "starting 2 processes") == "2 processes, computing the first steps"
    assert describe_start([launch, start, step], "starting") == "2 processes, computing the first steps"
    assert describe_start([start, Event(event="end", attempt=1, time=3.0)], "starting") == "starting"


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    monkeypatch.setenv("TERM", "xterm-256color")
    terminal = Terminal()
    yield terminal
    terminal.close()


@pytest.fixture
def live(run: Run, terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> Iterator[Display]:
    """A display on a terminal of 80 columns, whose training has started."""
    monkeypatch.setattr("sys.stderr", terminal.stream)
    display = Display(live=True)
    display.start(run, "train", "never run [red]", "starting 2 processes")
    yield display
    display.clear()


def add_metrics(run: Run, **values: object) -> None:
    run.partial("train").mkdir(exist_ok=True)
    with (run.partial("train") / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({**LINE, **values}) + "\n")


def test_a_terminal_shows_a_moving_line_while_processes_start(live: Display, terminal: Terminal) -> None:
    turns = {terminal.next_line()[0] for _ in range(12)}  # no tick: the line moves by itself
    assert len(turns) > 1
    assert re.fullmatch(r". train \d:\d\d  starting 2 processes", terminal.next_line())
    live.end("done in 1.0 s")
    assert "train: never run [red]\n" in terminal.output
    assert terminal.read_all().endswith("\x1b[?25htrain: done in 1.0 s\n")


def test_the_bar_of_training_fills_as_its_metrics_grow(run: Run, live: Display, terminal: Terminal) -> None:
    for step in (20, 30):
        add_metrics(run, step=step, total_steps=120)
        live.tick()
    line = terminal.line_with("step 30/120")
    assert len(line) < 80
    assert re.search(r"━+─+ \d:\d\d  epoch 2, step 30/120, loss 0.5000, \d+:\d\d left$", line)
    bar = re.findall("[━─]", line)
    assert bar.count("━") == len(bar) // 4


def test_a_log_line_is_printed_above_the_bar(run: Run, live: Display, terminal: Terminal) -> None:
    run.log("train").write_text(f"{'long ' * 40}\n")
    live.tick()
    live.end("done")
    assert f"\r\x1b[Jtrain | {'long ' * 40}\n" in terminal.read_all()


def test_metrics_of_an_earlier_attempt_are_not_shown_as_new(run: Run, live: Display, terminal: Terminal) -> None:
    add_metrics(run, step=30, total_steps=120)
    live.tick()
    run.log("train").write_text("rank 1 was killed; starting again from the checkpoint of step 20\n")
    live.tick()
    assert "━" in terminal.line_with("starting 2 processes"), "the bar stays"
    add_metrics(run, step=21, total_steps=120)
    live.tick()
    assert terminal.line_with("step 21/120")


def test_progress_line_is_removed_during_a_question(
    live: Display, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Answer:
        def isatty(self) -> bool:
            return True

        def readline(self) -> str:
            assert terminal.read_all().endswith("\r\x1b[J\x1b[?25hCancel it? ")
            return "n\n"

    monkeypatch.setattr("sys.stdin", Answer())
    monkeypatch.setattr("sys.stderr", terminal.stream)
    assert not live.ask("Cancel it? ")
    assert "starting 2 processes" in terminal.next_line(), "and comes back"


def test_the_line_is_removed_even_if_the_last_log_lines_cannot_be_read(
    run: Run, live: Display, terminal: Terminal
) -> None:
    run.log("train").mkdir()
    with pytest.raises(IsADirectoryError):
        live.end("interrupted")
    assert terminal.read_all().endswith("\r\x1b[J\x1b[?25h")


def test_a_dumb_terminal_gets_plain_lines(terminal: Terminal, monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr("sys.stderr", terminal.stream)
    display = Display(live=True)
    display.start(run, "train", "never run")
    display.end("done")
    assert re.fullmatch(r"\d\d:\d\d:\d\d train: never run\n\d\d:\d\d:\d\d train: done\n", terminal.read_all())


@pytest.mark.parametrize(("typed", "yes"), [("\n", True), ("y\n", True), ("n\n", False), ("No\n", False)])
def test_answer_is_read_from_the_terminal(typed: str, yes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "r+b", buffering=0) as raw, os.fdopen(ours, "r+b", buffering=0) as terminal:
        stream = io.TextIOWrapper(raw, write_through=True)
        monkeypatch.setattr("sys.stdin", stream)
        monkeypatch.setattr("sys.stderr", stream)
        terminal.write(typed.encode())
        assert Display(live=False).ask("Cancel it? ") is yes
        stream.detach()


def test_without_a_terminal_the_answer_is_yes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("n\n"))
    assert Display(live=False).ask("Cancel it? ")


def test_remaining_time_follows_from_the_step_rate() -> None:
    pace = StepRate()
    assert pace.seconds_left(100) is None
    for now, step in ((0.0, 10), (1.0, 10), (5.0, 20)):
        pace.add(step, now)
    assert pace.seconds_left(100) == pytest.approx(40)
    assert pace.seconds_left(20) == 0


def test_step_rate_of_a_resumed_run_excludes_earlier_steps() -> None:
    pace = StepRate()
    pace.add(5000, 0.0)
    assert pace.seconds_left(10_000) is None
    pace.add(5010, 10.0)
    assert pace.seconds_left(5110) == pytest.approx(100)


def test_step_rate_is_that_of_the_last_minutes() -> None:
    pace = StepRate()
    for second in range(0, 1000, 10):  # a step a second, and then ten
        pace.add(second if second < 500 else 500 + 10 * (second - 500), float(second))
    assert pace.seconds_left(5400 + 1000) == pytest.approx(100, rel=0.2)
