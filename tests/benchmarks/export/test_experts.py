from __future__ import annotations

import json

import pytest

from benchmarks.export.__main__ import main
from benchmarks.export.experts import Cost, table


def test_table_has_the_costs_of_each_implementation() -> None:
    text = table([Cost("batched_mm", 4, {"1": 0.5, "512": 60.25}, 1024.4, 1e-7)])
    assert text.splitlines()[-1] == "| 4 | `batched_mm`: weights gathered for each token | 0.500 | 60.250 | 1024 |"


@pytest.mark.long
def test_loop_over_experts_is_cheaper_than_gathered_weights(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--experts", "16", "--hidden", "128", "-o", "json"]) == 0
    gathered, loop = json.loads(capsys.readouterr().out)
    assert (gathered["form"], loop["form"]) == ("batched_mm", "grouped_mm")
    assert max(gathered["largest_error"], loop["largest_error"]) < 1e-4
    assert loop["memory_mb"] < gathered["memory_mb"] / 4
    assert loop["milliseconds"]["512"] < gathered["milliseconds"]["512"] / 2
