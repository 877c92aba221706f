from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
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
from pipeline.service.process import LiveService, read_live, write_live
from pipeline.service.rollout import (
    Ports,
    ServiceStart,
    argv,
    canary_share,
    choose_rollout,
    process_stamp,
    promote,
    rollback,
    shadow_bundle,
    start,
    swap_bundle,
)
from pipeline.system.errors import ConfigError, StageError

from ..conftest import NewRun, bundle_of
from ..packing import record_export


def champion(run: Run) -> str:
    return read_registry(run.runs, "").names[CHAMPION].bundle


def test_what_serves_is_what_the_next_candidate_has_to_beat(new_run: NewRun) -> None:
    run = new_run()
    promote(run, bundle_of(run, "one"))
    entry = read_registry(run.runs, "").names[CHAMPION]
    assert (entry.bundle, entry.checkpoint, entry.path) == ("one", "checkpoint of one", f"{run.id}/export/bundle")
    assert read_registry(run.runs, "").history[-1].reason == f"deployed by run {run.id}"


def test_the_one_it_replaces_is_remembered(new_run: NewRun) -> None:
    run = new_run()
    for digest in ("one", "two"):
        promote(run, bundle_of(run, digest))
    assert champion(run) == "two"
    assert read_registry(run.runs, "").names[PREVIOUS].bundle == "one"


def test_the_same_bundle_in_a_later_run_changes_nothing(new_run: NewRun) -> None:
    first, later = new_run(), new_run()
    promote(first, bundle_of(first, "one"))
    before = read_registry(first.runs, "")
    promote(later, bundle_of(later, "one"))
    assert read_registry(first.runs, "") == before


def test_each_rollback_goes_one_bundle_further_back(new_run: NewRun) -> None:
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


def test_without_a_previous_one_there_is_nothing_to_go_back_to(new_run: NewRun) -> None:
    with pytest.raises(ConfigError, match="no previous champion"):
        rollback(new_run().runs, "")


def test_a_name_of_ones_own_has_a_history_own(new_run: NewRun) -> None:
    run = new_run()
    for digest in ("one", "two"):
        promote(run, bundle_of(run, digest), "tried", name="staging")
    assert read_registry(run.runs, "").names["staging"].bundle == "two"
    assert CHAMPION not in read_registry(run.runs, "").names
    assert rollback(run.runs, "", "staging", "too slow").bundle == "one"
    assert [change.reason for change in read_registry(run.runs, "").history][-1] == "too slow"


def test_previous_follows_from_the_history_and_is_given_by_no_one(new_run: NewRun) -> None:
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
    values = {
        "name": "tiny", "run": "one", "bundle": "a" * 64, "pid": 1, "process_started": 0.0, "host": "127.0.0.1",
        "port": 8080, "grpc_port": 8081, "requested_port": 8080, "since": "now", "log": "log", "admin_port": 8090,
        "token": "token", "stamp": STAMP, "max_body_bytes": 1,
    }  # fmt: skip
    return LiveService.model_validate({**values, **changes})


def _with(config: Config, section: str, **changes: Any) -> Config:
    return config.model_copy(update={section: getattr(config, section).model_copy(update=changes)})


def test_where_nothing_serves_a_process_is_started(config: Config, bundle: Bundle) -> None:
    assert choose_rollout(None, config, bundle, STAMP)[0] == "start"


def test_where_the_bundle_alone_is_another_it_is_swapped_in(config: Config, bundle: Bundle) -> None:
    assert choose_rollout(_live(), config, bundle, STAMP)[0] == "swap"
    assert choose_rollout(_live(bundle=bundle.digest), config, bundle, STAMP)[0] == "swap", "which then changes nothing"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"host": "0.0.0.0"}, "address has changed"),
        ({"requested_port": 9000}, "address has changed"),
        ({"admin_port": 0}, "no admin interface"),
        ({"stamp": "of yesterday"}, "packages, the service's own source or its options have changed"),
        ({"name": "small"}, "the model is called tiny now"),
        ({"max_body_bytes": 0}, "its requests may be larger"),
    ],
)
def test_what_belongs_to_the_process_needs_another_process(
    config: Config, bundle: Bundle, changes: dict[str, Any], reason: str
) -> None:
    way, why = choose_rollout(_live(**changes), config, bundle, STAMP)
    assert way == "take over"
    assert reason in why


def test_several_workers_are_replaced_by_another_process(config: Config, bundle: Bundle) -> None:
    way, why = choose_rollout(_live(), _with(config, "serve", workers=2), bundle, STAMP)
    assert (way, why) == ("take over", "several workers load their bundles at the start")


def test_the_stamp_is_of_the_options_too_and_stays_the_same() -> None:
    assert service_view_options(Serve(workers="auto")) == ["--workers", "auto"]
    assert service_view_options(Serve()) == []
    assert process_stamp(["--no-page"]) == process_stamp(["--no-page"]) != process_stamp([])


def test_the_stamp_changes_with_the_source_of_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    stamps = set()
    for changed in ("", "serve", "pipeline.contract"):
        monkeypatch.setattr(
            rollout, "package_sources", lambda *names, changed=changed: {name: str(name == changed) for name in names}
        )
        stamps.add(process_stamp([]))
    assert len(stamps) == 3


def test_a_share_is_a_number_and_none_is_0(config: Config) -> None:
    assert canary_share(config) == 0
    assert canary_share(_with(config, "rollout", canary_percent=10)) == 0.1


def _sealed(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "manifest.json").touch()
    return folder


def test_a_shadow_is_a_folder_of_the_project_or_a_run(config: Config, run: Run, tmp_path: Path) -> None:
    assert shadow_bundle(config, run, tmp_path) is None
    folder = _sealed(tmp_path / "candidates" / "next")
    assert shadow_bundle(_with(config, "serve", shadow="candidates/next"), run, tmp_path) == folder
    with pytest.raises(ConfigError, match=f"serve.shadow: {run.id} has no bundle"):
        shadow_bundle(_with(config, "serve", shadow=run.id), run, tmp_path)
    sealed = _sealed(run.bundle_path)
    record_export(run)
    assert shadow_bundle(_with(config, "serve", shadow=run.id), run, tmp_path) == sealed


def test_a_process_is_reported_all_it_needs(new_run: NewRun, bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    run, old = new_run(), _live()
    config = _with(run.config, "rollout", canary_percent=10)
    monkeypatch.setattr(Run, "config", config)
    monkeypatch.setattr(Run, "require_bundle", bundle_of)
    order = ServiceStart(Run(run.path), bundle, Access(), ["--no-page"], STAMP, Path("/candidate"))
    words = argv(order, Ports(1, 2, 3, 4), Path("/token"), old)
    text = " ".join(words)
    old_path = Run(run.runs / "one").bundle_path
    assert text.startswith(f"-m serve tiny={old_path} tiny={run.bundle_path.resolve()} --host 127.0.0.1 --port 1")
    assert "--grpc-port 2 --standby 3 --admin 4 --admin-token /token --no-page --canary 0.1" in text
    assert "--shadow /candidate --log-format text" in text
    alone = " ".join(argv(order, Ports(1, 2, 3, 4), Path("/token"), None))
    assert "--canary" not in alone
    assert str(old_path) not in alone


@pytest.fixture
def service() -> Iterator[tuple[int, list[str], list[float]]]:
    """A port, the changes that were made over it, and the predictions that version 2 gives to its golden request."""
    changes: list[str] = []
    predictions = [2.0]

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("X-Bundle-Digest", "b" * 64)
            self.end_headers()
            if self.path.startswith("/v"):
                body: dict[str, Any] = {"predictions": predictions}
            else:
                changes.append(self.path)
                body = {"version": "2"}
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, *args: object) -> None:
            """Silent."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server.server_port, changes, predictions
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize(
    ("found", "percent", "made"),
    [
        (2.0, 0, ["/load", "/shadow", "/switch"]),
        (2.0, 10, ["/load", "/shadow", "/canary"]),
        (2.1, 0, ["/load", "/forget"]),
    ],
)
def test_a_bundle_gets_requests_only_once_its_golden_answers_are_right(
    run: Run,
    bundle: Bundle,
    service: tuple[int, list[str], list[float]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    found: float,
    percent: float,
    made: list[str],
) -> None:
    port, changes, predictions = service
    predictions[:] = [found]
    run.bundle_path.mkdir(parents=True)
    Golden({}, {}, [1.0], [2.0], rtol=1e-3, atol=1e-4).write(run.bundle_path)
    (tmp_path / "token").write_text("token")
    old = _live(port=port, admin_port=port, token=str(tmp_path / "token"))
    write_live(run.runs, old)
    monkeypatch.setattr(Run, "config", _with(run.config, "rollout", canary_percent=percent))
    monkeypatch.setattr(rollout, "_verify_here", lambda _: None)  # the bundle has no model
    run = Run(run.path)
    if found == 2.0:
        new, count = swap_bundle(run, bundle, old, None, print)
        assert (count, new) == (2, read_live(run.runs))
        assert (new.bundle, new.canary is not None) == (old.bundle if percent else bundle.digest, bool(percent))
    else:
        with pytest.raises(StageError, match=r"predictions\[0\]: expected 2.0, found 2.1"):
            swap_bundle(run, bundle, old, None, print)
        assert read_live(run.runs) == old
    assert changes == made


def test_a_process_that_ends_while_it_starts_leaves_nothing_behind(
    run: Run, bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollout, "argv", lambda *_: ["-c", "raise SystemExit('no room')"])
    old = _live()
    write_live(run.runs, old)
    with pytest.raises(StageError, match="the service ended while starting: no room"):
        start(ServiceStart(run, bundle, Access(), [], STAMP, None), None, print)
    assert read_live(run.runs) == old
    assert not (run.path / "admin.token").exists()
