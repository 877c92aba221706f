from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.contract.bundle import Bundle
from pipeline.contract.config import Config
from pipeline.contract.golden import Golden
from pipeline.contract.registry import CHAMPION, PREVIOUS, read_registry
from pipeline.contract.run import Run
from pipeline.contract.settings.access import Access
from pipeline.contract.settings.stages import Serve, service_view_options
from pipeline.service import rollout
from pipeline.service.process import CanaryRecord, LiveService, read_live, spawn, stop_process, write_live
from pipeline.service.rollout import (
    Ports,
    ServiceStart,
    argv,
    end_canary,
    finish_canary,
    process_stamp,
    promote,
    reason_to_start,
    requested_start,
    rollback,
    shadow_bundle,
    start,
)
from pipeline.system.errors import ConfigError, StageError
from tests.ports import free_port

from ..conftest import NewRun, bundle_of
from ..packing import record_export
from ..records import live_service


def champion(run: Run) -> str:
    return read_registry(run.runs, "").names[CHAMPION].bundle


def test_promoted_bundle_is_the_next_champion(new_run: NewRun) -> None:
    run = new_run()
    promote(run, bundle_of(run, "one"))
    entry = read_registry(run.runs, "").names[CHAMPION]
    assert (entry.bundle, entry.checkpoint, entry.path) == ("one", "checkpoint of one", f"{run.id}/export/bundle")
    assert read_registry(run.runs, "").history[-1].reason == f"deployed by run {run.id}"


def test_the_same_bundle_in_a_later_run_changes_nothing(new_run: NewRun) -> None:
    first, later = new_run(), new_run()
    promote(first, bundle_of(first, "one"))
    before = read_registry(first.runs, "")
    promote(later, bundle_of(later, "one"))
    assert read_registry(first.runs, "") == before


def test_another_reason_for_the_same_bundle_is_recorded_once(new_run: NewRun) -> None:
    run, other = new_run(), new_run()
    promote(other, bundle_of(other, "other"))
    promote(run, bundle_of(run, "one"))
    for _ in range(2):
        promote(run, bundle_of(run, "one"), "approved by the board")
    registry = read_registry(run.runs, "")
    assert [change.reason for change in registry.history][1:] == [f"deployed by run {run.id}", "approved by the board"]
    assert registry.names[PREVIOUS].bundle == "other"


def test_each_rollback_goes_back_one_more_bundle(new_run: NewRun) -> None:
    run = new_run()
    for digest in ("one", "two", "three"):
        promote(run, bundle_of(run, digest))
    assert rollback(run.runs, "").bundle == champion(run) == "two"
    assert rollback(run.runs, "").bundle == champion(run) == "one"
    with pytest.raises(ConfigError, match="no previous champion"):
        rollback(run.runs, "")
    promote(run, bundle_of(run, "four"))
    assert rollback(run.runs, "").bundle == champion(run) == "one"
    assert [change.reason for change in read_registry(run.runs, "").history][-1] == "rolled back"


def test_custom_name_has_its_own_history(new_run: NewRun) -> None:
    run = new_run()
    for digest in ("one", "two"):
        promote(run, bundle_of(run, digest), "tried", name="staging")
    assert read_registry(run.runs, "").names["staging"].bundle == "two"
    assert CHAMPION not in read_registry(run.runs, "").names
    assert rollback(run.runs, "", "staging", "too slow").bundle == "one"
    assert [change.reason for change in read_registry(run.runs, "").history][-1] == "too slow"


def test_previous_cannot_be_promoted_to(new_run: NewRun) -> None:
    run = new_run()
    with pytest.raises(ConfigError, match="previous follows from the history"):
        promote(run, bundle_of(run, "one"), name=PREVIOUS)


STAMP = "of today"


@pytest.fixture
def run(new_run: NewRun) -> Run:
    return new_run()


@pytest.fixture
def bundle(run: Run) -> Bundle:
    return bundle_of(run, "b" * 64)


def _live(**changes: Any) -> LiveService:
    return live_service(**{"stamp": STAMP, **changes})


def _request(run: Run, bundle: Bundle, **changes: Any) -> ServiceStart:
    request = ServiceStart(run, bundle, Access(), ("--no-page",), STAMP, "127.0.0.1", 9000, 60)
    return replace(request, **changes)


def _with(config: Config, section: str, **changes: Any) -> Config:
    return config.model_copy(update={section: getattr(config, section).model_copy(update=changes)})


def test_live_process_that_meets_the_request_is_kept(run: Run, bundle: Bundle) -> None:
    wanted, digest = _request(run, bundle), bundle.digest
    canary = CanaryRecord(run=run.id, bundle=digest, share=0.1)
    assert reason_to_start(_live(bundle=digest), wanted) == ""
    assert reason_to_start(_live(bundle=digest), replace(wanted, share=0.1)) == "", "it has all requests already"
    assert reason_to_start(_live(canary=canary), replace(wanted, share=0.1)) == ""


CANARY = {"run": "two", "bundle": "b" * 64, "share": 0.1}


@pytest.mark.parametrize(
    ("live", "request_changes", "reason"),
    [
        (None, {}, "no service is live yet"),
        ({}, {}, "the bundle has changed"),
        ({"host": "0.0.0.0"}, {}, "the address has changed"),
        ({"requested_port": 8080}, {}, "the address has changed"),
        ({"stamp": "of yesterday"}, {}, "packages, the service's own source or its options have changed"),
        ({"name": "small"}, {}, "the model is called tiny now"),
        ({"canary": CANARY}, {"share": 0.2}, "the bundle has changed"),
        ({"canary": CANARY}, {}, "the bundle has changed"),
        ({"bundle": "b" * 64, "canary": {**CANARY, "bundle": "c" * 64}}, {}, "the canary ends"),
        ({"bundle": "b" * 64}, {"shadow": "/candidate"}, "the shadow has changed"),
        ({"bundle": "b" * 64, "shadow": "/candidate"}, {}, "the shadow has changed"),
    ],
)
def test_any_difference_starts_another_process(
    run: Run, bundle: Bundle, live: dict[str, Any] | None, request_changes: dict[str, Any], reason: str
) -> None:
    found = reason_to_start(None if live is None else _live(**live), _request(run, bundle, **request_changes))
    assert found == reason


def test_request_follows_from_the_settings(config: Config, run: Run, bundle: Bundle) -> None:
    changed = _with(_with(config, "rollout", canary_percent=10), "serve", workers=2)
    request = requested_start(run, changed, bundle, Access(), Path("/candidate"), Path("/project"))
    assert (request.share, request.shadow, request.options) == (0.1, "/candidate", ("--workers", "2"))
    unchanged = requested_start(run, config, bundle, Access(), None, Path("/project"))
    assert request.stamp == process_stamp(request.options) != unchanged.stamp
    sampled = requested_start(run, _with(config, "serve", sample=0.5), bundle, Access(), None, Path("/project"))
    assert sampled.options == (
        "--sample", "0.5", "--sample-max-bytes", "1073741824", "--sample-to", "/project/samples",
    )  # fmt: skip


def test_stamp_depends_on_options_and_source_of_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    assert service_view_options(Serve(workers="auto")) == ["--workers", "auto"]
    assert service_view_options(Serve()) == []
    assert process_stamp(["--no-page"]) == process_stamp(["--no-page"]) != process_stamp([])
    stamps = set()
    for changed in ("", "serve", "pipeline.contract"):
        monkeypatch.setattr(
            rollout, "package_sources", lambda *names, changed=changed: {name: str(name == changed) for name in names}
        )
        stamps.add(process_stamp([]))
    assert len(stamps) == 3


def _sealed(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "manifest.json").touch()
    return folder


def test_shadow_may_be_a_folder_or_a_run(config: Config, run: Run, tmp_path: Path) -> None:
    assert shadow_bundle(config, run, tmp_path) is None
    folder = _sealed(tmp_path / "candidates" / "next")
    assert shadow_bundle(_with(config, "serve", shadow="candidates/next"), run, tmp_path) == folder
    with pytest.raises(ConfigError, match=f"serve.shadow: {run.id} has no bundle"):
        shadow_bundle(_with(config, "serve", shadow=run.id), run, tmp_path)
    sealed = _sealed(run.bundle_path)
    record_export(run)
    assert shadow_bundle(_with(config, "serve", shadow=run.id), run, tmp_path) == sealed


def test_command_line_of_the_service_has_all_options(run: Run, bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Run, "require_bundle", bundle_of)
    request, old, ports = _request(run, bundle, share=0.1, shadow="/candidate"), _live(), Ports(1, 2, 3, 4)
    text = " ".join(argv(request, ports, old))
    old_path = Run(run.runs / "one").bundle_path
    assert text.startswith(f"-m serve tiny={old_path} tiny={run.bundle_path.resolve()} --host 127.0.0.1 --port 1")
    assert "--grpc-port 2 --standby 3 --health-port 4 --no-page --canary 0.1" in text
    assert "--shadow /candidate --log-format text" in text
    alone = " ".join(argv(request, ports, None))
    assert "--canary" not in alone
    assert str(old_path) not in alone


# A fake service: answers on its standby port and, after SIGUSR1, on the public one.
SERVICE = """
import json, os, signal, sys, threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer({})

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.answer({"predictions": [float(sys.argv[3])]})

    def answer(self, body):
        self.send_response(200)
        self.send_header("X-Bundle-Digest", "b" * 64)
        self.send_header("X-Served-By", str(os.getpid()))
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *args): ...

def listen(port):
    threading.Thread(target=ThreadingHTTPServer(("127.0.0.1", int(port)), Handler).serve_forever).start()

signal.signal(signal.SIGUSR1, lambda *_: listen(sys.argv[2]))
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
listen(sys.argv[1])
signal.pause()
signal.pause()
"""


@pytest.mark.parametrize("answer", [2.0, 2.1])
def test_a_bundle_gets_requests_only_once_its_golden_answers_are_right(
    run: Run, bundle: Bundle, monkeypatch: pytest.MonkeyPatch, answer: float
) -> None:
    run.bundle_path.mkdir(parents=True)
    Golden({}, {}, [1.0], [2.0], rtol=1e-3, atol=1e-4).write(run.bundle_path)
    monkeypatch.setattr(rollout, "argv", lambda _r, p, _o: ["-c", SERVICE, str(p.standby), str(p.public), str(answer)])
    processes: list[subprocess.Popen[bytes]] = []

    def noted_spawn(*given: Any) -> subprocess.Popen[bytes]:
        processes.append(spawn(*given))
        return processes[-1]

    monkeypatch.setattr(rollout, "spawn", noted_spawn)
    old, request = _live(), _request(run, bundle, port=free_port())
    write_live(run.runs, old)
    try:
        if answer == 2.0:
            live, count = start(request, None, print)
            assert (count, live.bundle, read_live(run.runs)) == (2, bundle.digest, live)
            assert stop_process(live.pid, live.process_started)
        else:
            with pytest.raises(StageError, match=r"predictions\[0\]: expected 2.0, found 2.1"):
                start(request, None, print)
            assert read_live(run.runs) == old
        assert processes[0].wait(60) == 0, "it got SIGTERM"
    finally:
        for process in processes:  # also where the code under test did not stop it
            process.kill()
            process.wait(60)


def test_a_process_that_ends_while_it_starts_leaves_the_old_record(
    run: Run, bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = "print(1, 2, 3, sep=chr(10), flush=True); raise SystemExit('no room')"
    monkeypatch.setattr(rollout, "argv", lambda *_: ["-c", program])
    old = _live()
    write_live(run.runs, old)
    with pytest.raises(StageError, match="the service ended while starting: 2 / 3 / no room"):
        start(_request(run, bundle), None, print)
    assert read_live(run.runs) == old


@pytest.mark.parametrize(("end", "run_id", "digest"), [(end_canary, "one", "a" * 64), (finish_canary, "two", "b" * 64)])
def test_a_canary_ends_by_another_process_with_the_same_options(
    run: Run, monkeypatch: pytest.MonkeyPatch, end: Any, run_id: str, digest: str
) -> None:
    live = _live(canary=CANARY, options=("--no-page",), shadow="/candidate")
    requests: list[ServiceStart] = []

    def begin(request: ServiceStart, old: LiveService, report: object) -> tuple[LiveService, int]:
        requests.append(request)
        return old.model_copy(update={"run": request.run.id, "bundle": request.bundle.digest, "canary": None}), 2

    monkeypatch.setattr(rollout, "start", begin)
    monkeypatch.setattr(rollout, "promote", lambda *arguments: arguments)
    monkeypatch.setattr(Run, "require_bundle", bundle_of)
    monkeypatch.setattr(Run, "config", run.config)
    end(run.runs, live, print)
    (request,) = requests
    assert (request.run.id, request.bundle.digest, request.share) == (run_id, digest, 0.0)
    assert (request.options, request.stamp, request.shadow) == (live.options, live.stamp, live.shadow)
