"""Compare a file with torch wherever it may run: on each provider, with one thread and with all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from export.compare import Case, Rows, compare_kinds
from export.report import Report
from export.sessions import runtime_setups
from export.tolerance import Scales
from pipeline.contract.settings.stages import Export


def compare_everywhere(cases: Sequence[Case], path: Path, config: Export, scales: Scales | None = None) -> Report:
    """Return a row for each kind of cases and each setup of this machine."""
    setups, left_out = runtime_setups()
    rows = Rows()
    for setup in setups:
        named = (replace(case, text=f"{case.text} ({setup.text})") for case in cases)
        rows += compare_kinds(setup.open_graph(path), named, partial(setup.tolerance, config), setup.text, scales)
    return Report(coverage=rows, left_out=left_out)
