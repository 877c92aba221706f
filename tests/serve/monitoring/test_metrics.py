from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from serve.errors import Busy
from serve.monitoring.metrics import Histogram, ModelMetrics
from serve.monitoring.prometheus import exposition
from serve.monitoring.request_log import RequestLog
from serve.monitoring.snapshot import Metrics, VersionSnapshot
from serve.protocol.statistics import version_statistics
from serve.request_context import RequestContext, in_flight
from serve.runtime.predictor import CodecError
from serve.shadow import Agreement

LABELS = ("model", "version", "protocol", "code", "reason", "phase", "digest", "result", "verdict", "provider")


@dataclass
class Loaded:
    """A version with the attributes that the metrics read."""

    name: str
    version: str
    metrics: ModelMetrics = field(default_factory=ModelMetrics)

    def __post_init__(self) -> None:
        self.digest = f"digest-{self.version}"
        self.bundle = SimpleNamespace(manifest=SimpleNamespace(verdict="pass"))
        self.predictor = SimpleNamespace(
            unbatched_reason="", session=SimpleNamespace(provider="CPUExecutionProvider", fallback="")
        )
        self.batcher = SimpleNamespace(waiting=3)
        self.canary: Any = None
        self.shadow: Any = None
        self.generator: Any = None


def _values(metrics: Metrics) -> dict[tuple[str, ...], float]:
    """Return each sample by its name and its labels' values, in the order of LABELS."""
    text = exposition(metrics.snapshot())[0].decode()
    return {
        (sample.name, *(sample.labels[one] for one in LABELS if one in sample.labels)): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def _prediction(requests: RequestLog, protocol: str = "v2") -> RequestContext:
    request = RequestContext({}, "/")
    request.protocol = protocol
    in_flight.count += 1
    return request


def _answer(requests: RequestLog, version: Any, status: int | str, protocol: str = "v2") -> None:
    request = _prediction(requests, protocol)
    request.model_version, request.status = version, status
    requests.finish(request)


@pytest.fixture
def loaded() -> list[tuple[Any, bool]]:
    return [(Loaded("tiny", "1"), False), (Loaded("tiny", "2"), True), (Loaded("other", "1"), True)]


@pytest.fixture
def requests(loaded: list[tuple[Any, bool]], monkeypatch: pytest.MonkeyPatch) -> RequestLog:
    monkeypatch.setattr(in_flight, "count", 0)
    return RequestLog(Metrics(lambda: loaded))


def test_statistics_are_those_of_the_metrics(requests: RequestLog, loaded: list[tuple[Any, bool]]) -> None:
    version = loaded[0][0]
    for status in (200, "OK", 400):
        _answer(requests, version, status)
    before = time.time()
    version.metrics.record_request("v2", 200, 0.5, (1.0, 1.125, 1.375, 1.875, 1.9375))
    for rows in (4, 1, 4):
        version.metrics.record_batch(1, rows, 0.25)
    found = version_statistics(VersionSnapshot.of(version, is_current=True))
    assert (found["name"], found["version"]) == ("tiny", "1")
    assert (found["inference_count"], found["execution_count"]) == (9, 3)
    assert int(before * 1000) <= found["last_inference"] <= time.time() * 1000
    stats = found["inference_stats"]
    assert (stats["success"]["count"], stats["fail"]["count"]) == (3, 1)
    assert stats["success"]["ns"] >= 500_000_000 > stats["fail"]["ns"] > 0
    nanoseconds = {"queue": 250, "compute_input": 125, "compute_infer": 500, "compute_output": 62.5}
    for name, expected in nanoseconds.items():
        assert stats[name] == {"count": 1, "ns": expected * 1_000_000}
    assert stats["cache_hit"] == {"count": 0, "ns": 0}
    batches = [(one["batch_size"], one["compute_infer"]) for one in found["batch_stats"]]
    assert batches == [(1, {"count": 1, "ns": 250_000_000}), (4, {"count": 2, "ns": 500_000_000})]


def test_kinds_of_batches_are_bounded() -> None:
    metrics = ModelMetrics()
    for rows in range(1000):
        metrics.record_batch(1, rows, 0.25)
    assert len(metrics.batch_sizes) == 256


def test_requests_are_counted_by_model_version_protocol_and_code(
    requests: RequestLog, loaded: list[tuple[Any, bool]]
) -> None:
    for served, code, protocol in ((0, 200, "v1"), (0, 200, "v1"), (1, 200, "v2"), (2, "OK", "grpc")):
        _answer(requests, loaded[served][0], code, protocol)
    _answer(requests, None, 404)
    found = {key[1:]: value for key, value in _values(requests.metrics).items() if key[0] == "pipe_requests_total"}
    assert found == {
        ("tiny", "1", "v1", "200"): 2,
        ("tiny", "2", "v2", "200"): 1,
        ("other", "1", "grpc", "OK"): 1,
        ("", "", "v2", "404"): 1,
    }


def test_unloaded_version_has_no_series(requests: RequestLog, loaded: list[tuple[Any, bool]]) -> None:
    for served, _ in loaded:
        _answer(requests, served, 200)
    gone, _ = loaded.pop(0)
    _answer(requests, gone, 200)  # it was in flight when its version was unloaded
    left = {key[1:3] for key in _values(requests.metrics) if key[0].startswith(("pipe_requests_total", "pipe_bundle"))}
    assert left == {("tiny", "2"), ("other", "1")}


def test_current_version_bundle_provider_and_queue_are_reported(requests: RequestLog) -> None:
    found = _values(requests.metrics)
    assert (found["pipe_version_current", "tiny", "1"], found["pipe_version_current", "tiny", "2"]) == (0, 1)
    assert found["pipe_bundle_info", "tiny", "2", "digest-2", "pass", "CPUExecutionProvider"] == 1
    assert found["pipe_provider_fell_back", "tiny", "2"] == 0
    assert found["pipe_queue_length", "tiny", "2"] == 3


def test_requests_in_flight_are_counted_until_they_finish(requests: RequestLog) -> None:
    request = _prediction(requests)
    assert _values(requests.metrics)["pipe_requests_in_flight",] == 1
    requests.finish(request)
    assert _values(requests.metrics)["pipe_requests_in_flight",] == 0


def test_a_request_that_is_no_prediction_is_not_counted(requests: RequestLog) -> None:
    requests.finish(RequestContext({}, "/metrics"))
    assert not [key for key in _values(requests.metrics) if key[0] == "pipe_requests_total"]


def test_refusals_are_counted_by_reason(requests: RequestLog, loaded: list[tuple[Any, bool]]) -> None:
    request = RequestContext({}, "/")
    request.model_version = loaded[1][0]
    assert requests.fail(request, Busy("full")) is not None
    assert _values(requests.metrics)["pipe_rejected_total", "tiny", "2", "busy"] == 1


def test_server_error_is_no_rejection_and_is_logged_with_its_id(
    requests: RequestLog, caplog: pytest.LogCaptureFixture
) -> None:
    request = RequestContext({b"x-request-id": b"mine"}, "/")
    assert requests.fail(request, KeyError("ours")) is None
    assert not [key for key in _values(requests.metrics) if key[0] == "pipe_rejected_total"]
    (record,) = caplog.records
    assert record.fields["request_id"] == "mine"  # type: ignore[attr-defined]
    assert "KeyError: 'ours'" in caplog.text


def test_codec_errors_are_logged_at_a_limited_rate(requests: RequestLog, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(1000):
        error = CodecError("instances: cannot be decoded")
        error.__cause__ = KeyError("what it stumbled over")
        assert requests.fail(RequestContext({}, "/"), error) is not None
    assert "what it stumbled over" in caplog.text
    assert len(caplog.records) <= 100
    assert _values(requests.metrics)["pipe_rejected_total", "", "", "invalid"] == 1000


def test_canary_share_and_shadow_results_are_reported(requests: RequestLog, loaded: list[tuple[Any, bool]]) -> None:
    old, new = loaded[1][0], loaded[0][0]
    old.canary = SimpleNamespace(candidate=new, share=0.1)
    old.shadow = SimpleNamespace(digest="digest-9", agreement=Agreement(same=7, other=2, failed=1, dropped=0))
    found = _values(requests.metrics)
    assert found["pipe_canary_share", "tiny", "1"] == 0.1
    results = {
        key[3]: value for key, value in found.items() if key[:3] == ("pipe_shadow_requests_total", "tiny", "digest-9")
    }
    assert results == {"same": 7, "other": 2, "failed": 1, "dropped": 0}


def test_each_phase_is_measured(requests: RequestLog, loaded: list[tuple[Any, bool]]) -> None:
    request = _prediction(requests)
    request.model_version = loaded[1][0]
    request.decode_started_at, request.decoded_at, request.run_started_at = 1.0, 1.2, 1.5
    request.run_ended_at, request.encoded_at = 2.4, 2.5
    requests.finish(request)
    found = _values(requests.metrics)
    sums = [found["pipe_phase_seconds_sum", "tiny", "2", phase] for phase in ("read", "wait", "run")]
    assert sums == pytest.approx([0.2, 0.3, 0.9])
    assert found["pipe_phase_seconds_count", "tiny", "2", "write"] == 1


def test_requests_are_counted_whatever_the_scrape_interval(
    requests: RequestLog, loaded: list[tuple[Any, bool]]
) -> None:
    for number in range(1000):
        _answer(requests, loaded[1][0], 200 if number % 2 else 503)
        if number in (0, 300, 999):
            found = _values(requests.metrics)
            assert found["pipe_request_seconds_count", "tiny", "2", "v2"] == number + 1
    assert found["pipe_requests_total", "tiny", "2", "v2", "200"] == 500
    assert found["pipe_requests_total", "tiny", "2", "v2", "503"] == 500


def test_values_added_at_once_count_like_single_ones() -> None:
    values = [0.5, 1, 1.5, 2, 4, 4.1, 100]
    one, all_at_once = Histogram((1, 2, 4)), Histogram((1, 2, 4))
    for value in values:
        one.observe(value)
    all_at_once.add(values)
    assert (all_at_once.counts, all_at_once.total) == (one.counts, one.total)


def test_a_histogram_counts_what_is_at_most_each_bound() -> None:
    histogram = Histogram((1, 2, 4))
    for value in (1, 1.5, 2, 5):
        histogram.observe(value)
    assert histogram.buckets() == [("1.0", 1), ("2.0", 3), ("4.0", 3), ("+Inf", 4)]
    assert (histogram.count, histogram.total) == (4, 9.5)


def test_batches_from_several_threads_are_all_counted() -> None:
    metrics = ModelMetrics()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: metrics.record_batch(2, 8, 0.001), range(8000)))
    assert (metrics.batch_requests.count, metrics.batch_rows.total) == (8000, 64_000)


def test_prometheus_and_openmetrics_formats_are_supported(requests: RequestLog) -> None:
    snapshot = requests.metrics.snapshot()
    assert exposition(snapshot)[1].startswith("text/plain; version=")
    body, content_type = exposition(snapshot, "application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    assert body.endswith(b"# EOF\n")
