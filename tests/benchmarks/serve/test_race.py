"""Ratios between contenders, and contenders that are left out."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.serve import race, table
from benchmarks.serve.arrivals import Arrived
from benchmarks.serve.contenders import BINARY, CONTENDERS, GRPC, JSON, V1, Contender
from benchmarks.serve.load import LoadResult, RequestSpec
from benchmarks.serve.openloop import summarize
from benchmarks.serve.race import Lap, Row
from benchmarks.serve.running import Running, log_file
from benchmarks.serve.workloads import WORKLOADS
from pipeline.system.errors import ResourceError, StageError


def _row(contender: str, wire: str, per_second: float, clients: int = 32) -> Row:
    return Row("digits", clients, contender, wire, per_second, 0.5, 1.0, 2.0, 50.0, 0)


def test_ratios_are_per_round_and_a_row_has_their_medians() -> None:
    laps = [
        Lap(LoadResult(100, rate, p50, 9.0, failed), cpu, limit)
        for rate, limit, p50, cpu, failed in [(100, 200, 1, 10, 0), (300, 400, 3, 30, 2), (200, 1000, 2, 20, 1)]
    ]
    found = race.row("digits", 32, "ours", JSON, laps)
    assert (found.per_second, found.to_raw, found.p50_ms, found.cpu_us) == (200, 0.5, 2, 20)
    assert found.failed == 3


def test_baseline_is_kserve_over_the_same_protocol() -> None:
    rows = [_row("kserve", JSON, 100), _row("kserve", GRPC, 50), _row("kserve", JSON, 10, clients=1)]
    assert table.baseline(rows, _row("ours", GRPC, 1)) == 50
    assert table.baseline(rows, _row("ours", V1, 1)) == 100, "it has no V1 here"
    assert table.baseline(rows, _row("ours", JSON, 1, clients=1)) == 10
    assert table.baseline([], _row("ours", JSON, 1)) is None


def test_the_table_shows_both_ratios_and_failures() -> None:
    rows = [_row("kserve", JSON, 100), Row("digits", 32, "ours", JSON, 1500, 0.25, 1.0, 2.0, 50.0, 7)]
    line = table.closed_loop(rows).splitlines()[-1]
    assert "| 1,500 | 0.250 | 15.00 |" in line
    assert "(7 failed)" in line


def test_overload_counts_predictions_refusals_and_failures() -> None:
    statuses = {200: 900, 503: 800, 504: 5}
    received = Arrived(1707, 10.0, statuses, 300.0, 900.0, refused_p99_ms=3.0, late_p99_ms=0.1, cpu_seconds=1.0)
    found = summarize("conv", 100.0, received, (0.1, 1.9))
    assert (found.goodput, found.refused, found.failed) == (90.0, 800, 7)
    assert (found.client_cores, found.service_cores) == (0.1, 1.9)


def test_contender_that_cannot_be_installed_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> Path:
        raise ResourceError("absent cannot be installed: no such package")

    monkeypatch.setattr("benchmarks.serve.contenders.python_of", refuse)
    absent = Contender("absent", {JSON: "/"}, "granian_bare", "absent")
    with race.start_services(WORKLOADS["digits"], [absent], tmp_path) as found:
        assert found == []
    assert "absent is left out: absent cannot be installed: no such package" in capsys.readouterr().err


def test_contender_that_ends_early_is_reported_with_its_output() -> None:
    with log_file() as log:
        running = Running("short", [sys.executable, "-c", "raise SystemExit('no licence')"], log)
        with pytest.raises(StageError, match="short does not answer: no licence"):
            running.wait_for_answer(RequestSpec("http://127.0.0.1:9/", b"", ()))
        running.close()


@pytest.mark.parametrize("wire", [V1, JSON, BINARY, GRPC])
def test_each_wire_format_has_its_body_and_its_headers(wire: str) -> None:
    request_spec = race.make_request_spec(WORKLOADS["digits"], wire, "/path", 1111, 2222)
    assert request_spec.url == f"http://127.0.0.1:{2222 if wire == GRPC else 1111}/path"
    assert request_spec.grpc == (wire == GRPC)
    headers = dict(request_spec.headers)
    assert ("inference-header-content-length" in headers) == (wire == BINARY)
    raw = WORKLOADS["digits"].request.tobytes()
    assert request_spec.body.endswith(raw) == (wire in (BINARY, GRPC))


def test_every_contender_has_a_script_and_pins() -> None:
    folder = Path(race.__file__).parent
    for one in CONTENDERS:
        assert not one.script or (folder / "servers" / f"{one.script}.py").is_file()
        assert not one.peer or (folder / "pins" / f"{one.peer}.txt").is_file()
