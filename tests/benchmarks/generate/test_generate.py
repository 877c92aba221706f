"""Decoding by several libraries: the table, and equality of the generated tokens."""

from __future__ import annotations

import re

import pytest

from benchmarks.generate.__main__ import TOKENS, Lap, _table, main


def test_the_table_has_medians_and_counts_equal_answers() -> None:
    equal, other = [[1, 2], [3, 4]], [[1, 2], [3, 5]]
    laps = {
        "transformers": [Lap(2.0, 3.0, equal), Lap(4.0, 5.0, equal), Lap(8.0, 7.0, equal)],
        "pipe": [Lap(1.0, 1.0, equal), Lap(2.0, 2.0, equal), Lap(4.0, 3.0, other)],
    }
    *_, reference, ours = _table(2, laps).splitlines()
    tokens = 2 * TOKENS
    assert reference == f"| transformers | 32 (16 to 64) | {5000 / tokens:.2f} | 6 of 6 |"
    assert ours == f"| pipe | 64 (32 to 128) | {2000 / tokens:.2f} | 5 of 6 |"


@pytest.mark.long
def test_all_libraries_generate_the_same_tokens(capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("onnxruntime_genai", reason="the extra `genai` is not installed")
    assert main(["--size", "1m", "--rounds", "1", "--texts", "2", "--without-llama"]) == 0
    assert re.findall(r"(\d) of (\d) \|", capfd.readouterr().out) == [("2", "2")] * 5
