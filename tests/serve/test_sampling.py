from __future__ import annotations

import asyncio
import json
import os
import subprocess
import threading
import time
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from pipeline.contract.bundle import PROBE_ID, open_bundle
from pipeline.contract.codec import Part
from pipeline.contract.samples import Kind, SampleFolder
from pipeline.system.errors import ConfigError
from serve.errors import Busy
from serve.options import parse_options
from serve.request_context import RequestContext
from serve.runtime.loading import load_predictor
from serve.runtime.predictor import Predictor
from serve.sampling import MAX_WAITING, Sampler, SamplingOptions
from tests.serve.bundles import build, digits
from tests.serve.conftest import ROOT, Launcher, Running
from tests.serve.load_clients import GrpcLoad, Load, wait_until

PREDICT, INFER = "/v1/models/tiny:predict", "/v2/models/tiny/infer"
GIB = 1 << 30
IMAGES = np.random.default_rng(3).random((2, 1, 8, 8)).astype(np.float32)


def read(folder: Path, kind: Kind = "samples") -> list[dict[str, Any]]:
    stored = SampleFolder(str(folder))
    tables = [stored.read(name) for name in stored.sizes(kind)]
    return [row for table in tables if table is not None for row in table.to_pylist()]


def metric(service: Running, name: str) -> float:
    lines = httpx.get(f"{service.url}/metrics").text.splitlines()
    return next(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


def sampling(folder: Path, *more: str) -> Sequence[str]:
    return ("--sample", "1", "--sample-to", str(folder), *more)


@pytest.fixture
def predictor(bundle_path: Path) -> Predictor:
    return load_predictor(open_bundle(bundle_path), "cpu", 1)


def offer(sampler: Sampler, predictor: Predictor, request_id: str = "r", images: Any = IMAGES) -> None:
    request = RequestContext({b"x-request-id": request_id.encode()}, PREDICT)
    request.encoded_at = request.received_at + 0.25
    outputs = {"logits": np.zeros((len(images), 10), np.float32)}
    sampler.offer(request, "tiny", predictor, [Part(range(len(images)), {"image": images})], [outputs])


def test_requests_of_every_protocol_are_kept_with_their_answers(
    start: Launcher, bundle_path: Path, picture: list[list[int]], tmp_path: Path
) -> None:
    service = start(bundle_path, options=sampling(tmp_path))
    v1 = httpx.post(f"{service.url}{PREDICT}", json={"instances": [picture, picture]})
    tensor = {"name": "image", "shape": [1, 1, 8, 8], "datatype": "FP32", "data": IMAGES[:1].reshape(-1).tolist()}
    v2 = httpx.post(f"{service.url}{INFER}", json={"inputs": [tensor]}, headers={"x-request-id": "mine"})
    httpx.post(f"{service.url}{PREDICT}", json={"instances": [picture]}, headers={"x-request-id": PROBE_ID})
    grpc = GrpcLoad(service.grpc_port)
    with grpc.running(1):
        grpc.answers(1)
    assert httpx.post(f"{service.url}{PREDICT}", json={"instances": ["no picture"]}).status_code == 400
    assert service.stop() == 0

    samples = read(tmp_path)
    by_id = {(row["id"], row["row"]): row for row in samples}
    assert len(by_id) == len(samples) == 3 + len(grpc.heard), "neither the probe nor what was refused"
    first, second = (by_id[v1.headers["x-request-id"], row] for row in (0, 1))
    assert (first["rows"], first["bundle"]) == (2, v1.headers["x-bundle-digest"])
    assert np.shape(first["input.image"]) == (1, 8, 8)
    assert first["input.image"] == second["input.image"]
    assert int(np.argmax(first["output.logits"])) == v1.json()["predictions"][0]["digit"]
    assert abs(first["time"] - time.time()) < 300
    assert 0 < first["seconds"] < 60
    assert np.array_equal(by_id["mine", 0]["input.image"], IMAGES[0])
    assert by_id["mine", 0]["output.logits"] == pytest.approx(v2.json()["outputs"][0]["data"])


def test_label_is_stored_when_it_is_answered(start: Launcher, bundle_path: Path, tmp_path: Path) -> None:
    service = start(bundle_path, options=sampling(tmp_path, "--workers", "2"))
    for request_id, label in (("a", 3), ("b", "seven"), ("a", [1, None])):
        answer = httpx.post(f"{service.url}/feedback", json={"id": request_id, "label": label})
        assert (answer.status_code, answer.json()) == (200, {"stored": True})
        assert [json.loads(row["label"]) for row in read(tmp_path, "labels")][-1] == label
    assert "/feedback" in httpx.get(f"{service.url}/openapi.json").json()["paths"]
    wait_until(lambda: metric(service, "pipe_labels_total") == 3)


def test_labels_that_come_together_share_a_file(tmp_path: Path) -> None:
    sampler = Sampler(SamplingOptions(1.0, str(tmp_path), GIB))

    async def send() -> None:
        await asyncio.gather(*(sampler.store_label(b'{"id": "%d", "label": 1}' % i) for i in range(50)))

    asyncio.run(send())
    sampler.close()
    assert sorted(int(row["id"]) for row in read(tmp_path, "labels")) == list(range(50))
    assert len(SampleFolder(str(tmp_path)).sizes("labels")) == 2, "the first one did not wait"


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        (b'{"id": "a"}', 400, "label"),
        (b'{"label": 1}', 400, "id"),
        (b'{"id": 7, "label": 1}', 400, "id"),
        (b'{"id": "", "label": 1}', 400, "id"),
        (b'{"id": "' + b"a" * 129 + b'", "label": 1}', 400, "128"),
        (b'{"id": "a", "label": 1, "more": 2}', 400, "more"),
        (b'[{"id": "a", "label": 1}]', 400, "object"),
        (b"{", 400, "body"),
        (b'{"id": "a", "label": "' + b"a" * (64 << 20) + b'"}', 413, "limit"),
    ],
    ids=["no label", "no id", "number as id", "empty id", "long id", "unknown key", "list", "no JSON", "large"],
)
def test_other_feedback_is_refused(labelled: Running, body: bytes, status: int, text: str) -> None:
    answer = httpx.post(f"{labelled.url}/feedback", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == status
    assert text in answer.json()["error"]


@pytest.fixture(scope="module")
def labelled(module_launcher: Launcher, bundle_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Running:
    return module_launcher(bundle_path, options=sampling(tmp_path_factory.mktemp("labels")))


def test_service_without_samples_takes_no_labels(server: Running) -> None:
    answer = httpx.post(f"{server.url}/feedback", json={"id": "a", "label": 1})
    assert (answer.status_code, "serve.sample" in answer.json()["error"]) == (404, True)
    assert "/feedback" not in httpx.get(f"{server.url}/openapi.json").json()["paths"]


REDACT = """

    def redact(self, instance):
        if instance["image"].max() > 1:
            raise ValueError("unknown kind of image")
        return {"image": instance["image"] * 0}
"""


def test_redacted_arrays_are_not_kept(picture: list[list[int]], tmp_path: Path) -> None:
    source = (ROOT / "examples/digits/codec.py").read_text().rstrip() + REDACT
    bundle = build(tmp_path / "bundle", "DigitsCodec", source, [picture], digits)
    predictor = load_predictor(open_bundle(bundle), "cpu", 1)
    sampler = Sampler(SamplingOptions(1.0, str(tmp_path / "samples"), GIB))
    offer(sampler, predictor, "kept")
    offer(sampler, predictor, "unknown", IMAGES + 1)
    sampler.close()
    samples = read(tmp_path / "samples")
    assert [(row["id"], row["row"], row["rows"]) for row in samples] == [("kept", 0, 2), ("kept", 1, 2)]
    assert all(np.array_equal(row["input.image"], np.zeros((1, 8, 8))) for row in samples)
    assert "output.logits" not in samples[0]
    assert (sampler.counts.written, sampler.counts.failed) == (1, 1)


def test_oldest_files_are_deleted_beyond_the_limit(predictor: Predictor, tmp_path: Path) -> None:
    for number in range(5):
        sampler = Sampler(SamplingOptions(1.0, str(tmp_path), 8000))
        offer(sampler, predictor, f"r{number}")
        sampler.close()
    sizes = SampleFolder(str(tmp_path)).sizes("samples")
    assert sampler.counts.files_deleted == 1
    assert 0 < sum(sizes.values()) <= 8000
    assert read(tmp_path)[-1]["id"] == "r4"


def test_folder_that_cannot_be_written_harms_no_answer(
    predictor: Predictor, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    sampler = Sampler(SamplingOptions(1.0, str(tmp_path / "file"), GIB))
    offer(sampler, predictor)
    with pytest.raises(Busy, match="send it again"):
        asyncio.run(sampler.store_label(b'{"id": "a", "label": 1}'))
    sampler.close()
    assert (sampler.counts.failed, sampler.counts.labels) == (1, 0)
    assert "samples could not be written" in caplog.text


def test_copies_beyond_the_bounds_are_dropped_at_once(
    predictor: Predictor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release, entered = threading.Event(), threading.Event()

    def wait(*_: Any) -> None:
        entered.set()
        assert release.wait(300)

    monkeypatch.setattr(Sampler, "_add", wait)
    sampler = Sampler(SamplingOptions(1.0, str(tmp_path), GIB))
    offer(sampler, predictor)
    assert entered.wait(300)
    for _ in range(MAX_WAITING + 7):
        offer(sampler, predictor)
    assert sampler.counts.dropped == 7
    release.set()
    sampler.close()
    offer(sampler, predictor, images=np.zeros((1 << 19, 1, 8, 8), np.float32))
    assert sampler.counts.dropped == 8, "more bytes than may wait"


class Consumer(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.events.append((dict(self.headers.items()), body))  # type: ignore[attr-defined]
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


def test_samples_are_sent_as_events_of_the_inference_logger(predictor: Predictor) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Consumer) as consumer:
        consumer.events = []  # type: ignore[attr-defined]
        thread = threading.Thread(target=consumer.serve_forever)
        thread.start()
        sampler = Sampler(SamplingOptions(1.0, url=f"http://127.0.0.1:{consumer.server_port}/"))
        offer(sampler, predictor, "r7")
        sampler.close()
        consumer.shutdown()
        thread.join()
        (first, request), (second, answer) = consumer.events  # type: ignore[attr-defined]
    assert sampler.counts.sent == 1
    assert not sampler.takes_labels
    for headers, kind in ((first, "request"), (second, "response")):
        headers = {name.lower(): value for name, value in headers.items()}
        assert headers["ce-type"] == f"org.kubeflow.serving.inference.{kind}"
        assert (headers["ce-id"], headers["ce-specversion"], headers["ce-inferenceservicename"]) == (
            "r7",
            "1.0",
            "tiny",
        )
    image = {"name": "image", "shape": [2, 1, 8, 8], "datatype": "FP32", "data": IMAGES.reshape(-1).tolist()}
    assert request == {"id": "r7", "inputs": [image]}
    assert answer["outputs"][0] == {"name": "logits", "shape": [2, 10], "datatype": "FP32", "data": [0.0] * 20}


@pytest.mark.parametrize(
    ("options", "reason"),
    [(["--sample", "1"], "where to"), (["--sample", "1", "--sample-url", "file:///x"], "no http")],
)
def test_options_that_lead_nowhere_are_refused(options: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        parse_options(["bundle", *options])


@pytest.mark.long
def test_service_under_load_answers_while_its_disk_fills_up(
    start: Launcher, bundle_path: Path, picture: list[list[int]], tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.getuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "samples", disk]).returncode:
        pytest.skip("needs the right to mount a file system of 64 KiB")
    try:
        service = start(bundle_path, options=sampling(disk))
        load = Load(service.port, {"instances": [picture] * 16}, keep_alive=True)
        with load.running(8):
            wait_until(lambda: metric(service, 'pipe_samples_total{result="failed"}') > 0)
            load.answers(2000)
        assert load.failures == []
        assert metric(service, 'pipe_samples_total{result="written"}') > 0
        with pytest.raises(OSError, match="No space"):
            (disk / "rest").write_bytes(bytes(1 << 16))
        assert httpx.post(f"{service.url}/feedback", json={"id": "a", "label": "b"}).status_code == 503
        assert service.stop() == 0
        assert read(disk), "every file is whole"
    finally:
        subprocess.run(["umount", "-l", disk], check=True)
