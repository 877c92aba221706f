from __future__ import annotations

import time
from dataclasses import replace

import pytest

from pipeline.display import StatusLine, StepProgress, Style, choose_style, clip, format_line

from .terminal import Terminal

FACTS = (
    "epoch 15, step 24400/42500, loss 0.0834, 12,346 samples/s, 1:02:03 left",
    "epoch 15, step 24400/42500, loss 0.0834, 1:02:03 left",
    "step 24400/42500, loss 0.0834, 1:02:03 left",
    "loss 0.0834, 1:02:03 left",
    "1:02:03 left",
)
PLAIN = Style(has_colors=False)


def training(**values: object) -> StepProgress:
    started = time.monotonic() - 3723
    return replace(StepProgress("train", FACTS, completed=1, total=2, started=started), **values)  # type: ignore[arg-type]


def test_no_line_is_longer_than_the_terminal() -> None:
    for progress in (training(), training(facts=()), training(total=0), training(completed=5)):
        assert all(len(format_line(progress, "|", width, PLAIN)) < width for width in range(1, 200))


def test_elapsed_time_is_whole_and_the_bar_shows_the_fraction() -> None:
    for width in range(20, 200):
        line = format_line(training(), "|", width, PLAIN)
        assert " 1:02:0" in line
        done, rest = line.count("━"), line.count("─")
        assert width < 30 or 6 <= done + rest <= 24
        assert width < 30 or done == (done + rest) // 2


@pytest.mark.parametrize(("width", "shown"), [(120, 0), (80, 1), (60, 3), (40, 4), (30, None)])
def test_a_narrow_terminal_shows_the_most_important_facts(width: int, shown: int | None) -> None:
    line = format_line(training(), "|", width, PLAIN)
    assert line.endswith(f"  {FACTS[shown]}" if shown is not None else " 1:02:03")


def test_a_line_without_a_total_has_no_bar() -> None:
    facts = ("epoch 15, step 244/425, loss 0.0834, 7,612 samples/s, 0:03 left", "epoch 15, step 244/425, loss 0.0834")
    line = format_line(StepProgress("train", facts, 244, 425), "|", 80, PLAIN)
    assert line == f"| train {'━' * 13}{'─' * 11} 0:00  {facts[1]}"
    assert format_line(StepProgress("export", ("converting",)), "|", 80, PLAIN) == "| export 0:00  converting"


def test_the_line_follows_the_width_of_the_window() -> None:
    terminal = Terminal(width=120)
    line = StatusLine(terminal.stream)
    line.start(training())
    try:
        assert len(terminal.line_with(FACTS[0])) < 120
        terminal.resize(60)
        assert len(terminal.line_with(f"  {FACTS[3]}")) < 60
    finally:
        line.stop()
        terminal.close()


def test_a_panel_is_drawn_below_the_line_and_the_cursor_returns() -> None:
    terminal = Terminal(width=20)
    line = StatusLine(terminal.stream)
    line.panel = ["first", "second line, which is longer than the window"]
    line.start(training())
    try:
        while "\x1b[K\nfirst\x1b[K\nsecond line, which \x1b[J\x1b[2A\r" not in terminal.read_all():
            time.sleep(0.01)
        line.panel = []
        terminal.line_with("train")  # and nothing below it
    finally:
        line.stop()
        terminal.close()


def test_first_lines_of_a_long_panel_are_drawn() -> None:
    lines = ["a", "b", "c"]
    assert clip(lines, 80, 3) == lines
    assert clip(lines, 80, 2) == ["a", "… 2 more lines"]
    assert clip(lines, 5, 1) == ["… 3 "]
    assert clip([], 80, -1) == []


def test_colors_follow_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    terminal = Terminal()
    assert "\x1b[1mtrain\x1b[0m" in format_line(training(), "|", 80, choose_style(terminal.stream))
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in format_line(training(), "|", 80, choose_style(terminal.stream))
    terminal.close()


def test_a_terminal_without_unicode_gets_ascii() -> None:
    terminal = Terminal(encoding="latin-1")
    style = choose_style(terminal.stream)
    assert format_line(training(), style.spinner[0], 80, style).isascii()
    terminal.close()
