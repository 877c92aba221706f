from __future__ import annotations

import re

import pytest

from benchmarks.start_up import main


@pytest.mark.long
def test_time_and_cpu_of_a_training_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--trainings", "1"]) == 0
    rows = re.findall(r"^(\w+) +(\d+\.\d+) s ", capsys.readouterr().out, re.MULTILINE)
    values = {name: float(value) for name, value in rows}
    assert values.keys() == {"first_step", "end", "cpu"}
    assert 0 < values["first_step"] <= values["end"]
    assert values["cpu"] > 0
