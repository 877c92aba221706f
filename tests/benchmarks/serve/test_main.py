"""Options of the benchmark, and the error for a missing program."""

from __future__ import annotations

import pytest

from benchmarks.serve import __main__ as bench
from benchmarks.serve import load
from pipeline.system.errors import ResourceError
from pipeline.system.sources import SOURCE_ROOT


def test_documented_options_are_valid() -> None:
    section = (SOURCE_ROOT / "docs/serving.md").read_text().partition("## Speed")[2]
    words = "--table capacity --bundle FOLDER --deadline-ms 100"
    assert f"`{words}`" in section
    bench._parse(words.split())


def test_missing_load_generators_are_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(load, "missing", lambda: ["wrk"])
    assert bench.main(["--quick"]) == ResourceError.exit_code
    assert capsys.readouterr().err == "error: wrk: not found; install wrk and nghttp2-client\n"
