from __future__ import annotations

import io
import json
import os
import pty
import re
from pathlib import Path

import pytest

from pipeline.contract.errors import ConfigError, GateError, StageError
from pipeline.contract.run import Run
from pipeline.display import Display, StepRate, begins_error, describe_metrics, format_duration, last_metrics, step_tail

LINE = {"step": 20, "epoch": 1, "loss": 0.5, "samples_per_second": 12345.6}
NOISE = "W0102 03:04:05.678 12 torch/distributed/run.py:1] one thing"

PROFILER = "USDT:2026-01-02 03:04:05 12:12 SyncActivityProfilerHandler.cpp:52] profiler_start"


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
    """Lines on standard error without their times; standard output is for data."""
    captured = capsys.readouterr()
    assert captured.out == ""
    lines: list[str] = captured.err.splitlines()
    return [re.sub(r"^\d\d:\d\d:\d\d ", "", line) for line in lines]


def test_plain_lines_bear_the_time(capsys: pytest.CaptureFixture[str]) -> None:
    Display(live=False).report("hello")
    assert re.fullmatch(r"\d\d:\d\d:\d\d hello\n", capsys.readouterr().err)


def test_what_a_step_writes_is_shown_under_its_name(
    run: Run, display: Display, capsys: pytest.CaptureFixture[str]
) -> None:
    run.log("train").write_text("epoch 1\nhalf a li")
    display.tick()
    assert printed_lines(capsys) == ["train | epoch 1"]
    run.log("train").write_text("epoch 1\nhalf a line\n")
    display.tick()
    assert printed_lines(capsys) == ["train | half a line"]


def test_what_an_earlier_attempt_wrote_is_not_shown_again(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run.log("train").write_text("long ago\n")
    display = Display(live=False)
    display.start(run, "train", "resumed")
    display.tick()
    assert printed_lines(capsys) == ["train: resumed"]


def test_the_launchers_own_words_and_tracebacks_stay_in_the_log(
    run: Run, display: Display, capsys: pytest.CaptureFixture[str]
) -> None:
    run.log("train").write_text(f"{NOISE}\nepoch 1\nTraceback (most recent call last):\n  File x\nValueError\n")
    display.tick()
    assert printed_lines(capsys) == ["train | epoch 1"]


def test_what_torchs_profiler_states_of_itself_stays_in_the_log(
    run: Run, display: Display, capsys: pytest.CaptureFixture[str]
) -> None:
    run.log("train").write_text(f"epoch 1\n{PROFILER}\nepoch 2\n")
    display.tick()
    assert printed_lines(capsys) == ["train | epoch 1", "train | epoch 2"]
    assert step_tail(["one", PROFILER, "two"]) == ["one", "two"]


def test_failed_step_shows_its_last_lines_and_how_to_continue(
    run: Run, display: Display, capsys: pytest.CaptureFixture[str]
) -> None:
    run.log("train").write_text("epoch 1\nValueError: no\n")
    display.failed(StageError("train: no"))
    assert printed_lines(capsys) == [
        "    epoch 1",
        "    ValueError: no",
        f"log: {run.log('train')}",
        f"to continue after fixing it: pipe run --resume {run.id} (if code changed: with --accept-changes)",
    ]


def test_a_users_mistake_is_reported_without_its_log(
    run: Run, display: Display, capsys: pytest.CaptureFixture[str]
) -> None:
    run.log("train").write_text("epoch 1\n")
    display.failed(ConfigError("no"))
    assert "    epoch 1" not in printed_lines(capsys)


def test_a_rejected_candidate_has_nothing_to_resume(
    run: Run, display: Display, capsys: pytest.CaptureFixture[str]
) -> None:
    display.failed(GateError("no"))
    assert printed_lines(capsys) == [f"log: {run.log('train')}"]


def test_the_tail_is_what_the_step_stated_before_its_launcher_did() -> None:
    assert step_tail(["one", "", "two", NOISE, "more noise"]) == ["one", "two"]
    assert step_tail([f"line {i}" for i in range(100)]) == [f"line {i}" for i in range(88, 100)]
    assert step_tail([NOISE]) == [NOISE], "better than nothing"
    assert step_tail(["ValueError: mine", *["echo: rank 0 lost contact"] * 20]) == ["ValueError: mine"]


@pytest.mark.parametrize("line", ["Traceback (most recent call last):", "[rank1]: Traceback", "error: no"])
def test_where_a_log_turns_to_debugging_is_seen(line: str) -> None:
    assert begins_error(line)
    assert not begins_error(f"epoch 1, {line}")


def test_what_torch_logs_of_a_rank_is_no_end() -> None:
    assert not begins_error("[rank0]:W1121 08:47:29.557000 31545 torch/_logging/_internal.py:1345] [0/0] ignored")


def test_the_newest_whole_training_line_is_found_behind_validation_and_half_lines(tmp_path: Path) -> None:
    journal = tmp_path / "metrics.jsonl"
    assert last_metrics(journal) is None
    older = json.dumps(LINE | {"step": 10, "padding": "x" * 5000})
    journal.write_text("\n".join([older, json.dumps(LINE), '{"step": 20, "validation": {"accuracy": 1}}', '{"st']))
    assert last_metrics(journal) == LINE


def test_progress_includes_the_remaining_time_where_known() -> None:
    assert describe_metrics(LINE, None) == "epoch 2, step 20, loss 0.5000, 12,346 samples/s"
    whole = {**LINE, "total_steps": 500}
    assert describe_metrics(whole, 65.4) == "epoch 2, step 20/500, loss 0.5000, 12,346 samples/s, 1:05 left"
    assert describe_metrics({"step": 1, "epoch": 0, "loss": 2.0}, None) == "epoch 1, step 1, loss 2.0000"


def test_a_terminal_gets_bars_and_the_same_words(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    display = Display(live=True)
    display.start(run, "train", "never run [red]")
    display.tick()
    display.end("done in 1.0 s")
    printed = capsys.readouterr().err
    assert "train: never run [red]" in printed
    assert "train: done in 1.0 s" in printed


def test_the_bar_of_training_fills_as_its_journal_grows(run: Run) -> None:
    display = Display(live=True)
    display.start(run, "train", "never run")
    assert display._progress is not None
    display.tick()
    assert display._progress.tasks[0].total is None, "nothing is known yet"
    run.partial("train").mkdir()
    journal = run.partial("train") / "metrics.jsonl"
    for step in (20, 30):
        with journal.open("a") as file:
            file.write(json.dumps({**LINE, "step": step, "total_steps": 120}) + "\n")
        display.tick()
    bar = display._progress.tasks[0]
    assert (bar.completed, bar.total) == (30, 120)
    assert re.search(r"step 30/120, .* left$", bar.fields["facts"])
    display.end("done")


@pytest.mark.parametrize(("typed", "yes"), [("\n", True), ("y\n", True), ("n\n", False), ("No\n", False)])
def test_a_question_is_requested_on_a_terminal(typed: str, yes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "r+b", buffering=0) as raw, os.fdopen(ours, "r+b", buffering=0) as terminal:
        stream = io.TextIOWrapper(raw, write_through=True)
        monkeypatch.setattr("sys.stdin", stream)
        monkeypatch.setattr("sys.stderr", stream)
        terminal.write(typed.encode())
        assert Display(live=False).ask("Cancel it? ") is yes
        stream.detach()


def test_without_a_terminal_nothing_is_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("n\n"))
    assert Display(live=False).ask("Cancel it? ")


def test_what_is_left_takes_as_long_as_the_steps_seen() -> None:
    pace = StepRate()
    assert pace.seconds_left(100) is None
    for now, step in ((0.0, 10), (1.0, 10), (5.0, 20)):
        pace.add(step, now)
    assert pace.seconds_left(100) == pytest.approx(40)
    assert pace.seconds_left(20) == 0


def test_a_resumed_run_is_not_thought_fast_for_where_it_started() -> None:
    pace = StepRate()
    pace.add(5000, 0.0)
    assert pace.seconds_left(10_000) is None
    pace.add(5010, 10.0)
    assert pace.seconds_left(5110) == pytest.approx(100)


def test_only_the_last_minutes_count() -> None:
    pace = StepRate()
    for second in range(0, 1000, 10):  # a step a second, and then ten
        pace.add(second if second < 500 else 500 + 10 * (second - 500), float(second))
    assert pace.seconds_left(5400 + 1000) == pytest.approx(100, rel=0.2)


@pytest.mark.parametrize(("seconds", "text"), [(0.2, "0:00"), (7, "0:07"), (754, "12:34"), (3723, "1:02:03")])
def test_durations_are_formatted_as_on_a_clock(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
