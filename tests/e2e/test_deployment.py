from __future__ import annotations

import http.client
import itertools
import json
import socket
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil
import pytest

from pipeline.contract.registry import read_registry
from pipeline.contract.run import Run, all_runs
from pipeline.contract.settings.access import Access
from pipeline.service.process import LiveService, read_live, send_request
from pipeline.system.files import digest_tree

from ..serve import certificates
from .project_folder import ProjectFolder, wait_for

NO_CLUSTER = {"KUBECONFIG": "/nowhere"}
NEXT = ("train.seed=1", "train.processes=1", "evaluate.margin=0.5")
IMAGE = f"registry/sides@sha256:{'5' * 64}"
STAMPS: dict[ProjectFolder, str] = {}  # of services with the project's own options
QUESTION = {"instances": [[0.0, 0.9]]}


@pytest.fixture(scope="module")
def project(finished: ProjectFolder, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProjectFolder]:
    """Two runs with different bundles, the first of them live."""
    project = finished.copy(tmp_path_factory.mktemp("deployment") / "sides")
    project.pipe("run", "--until", "package", *NEXT)
    try:
        yield project
    finally:
        project.stop()


@pytest.fixture
def first(project: ProjectFolder) -> Run:
    return all_runs(project.runs)[-1]


@pytest.fixture
def second(project: ProjectFolder) -> Run:
    """The run with the other seed."""
    return next(run for run in reversed(all_runs(project.runs)) if run.config.train.seed == 1)


@pytest.fixture
def live(project: ProjectFolder, first: Run) -> LiveService:
    """A live service of the first run's bundle, with the project's port and options."""
    current = read_live(project.runs)
    expected = (first.bundle().digest, STAMPS.get(project), project.port)
    if not (current and current.alive and (current.bundle, current.stamp, current.port) == expected):
        project.deploy(first)
        current = read_live(project.runs)
    assert current is not None
    assert current.port == project.port
    STAMPS[project] = current.stamp
    if current.canary is not None:
        project.pipe("registry", "rollback")
        current = read_live(project.runs)
    assert current is not None
    return current


class Client(threading.Thread):
    """Sends one request after the other, each on a new connection, until the block ends."""

    def __init__(self, port: int) -> None:
        super().__init__()
        self._port, self._done = port, threading.Event()
        self.answers: list[tuple[int, str]] = []  # status, bundle
        self.errors: list[Exception] = []
        self.pids: set[int] = set()  # of the processes that answered

    def run(self) -> None:
        while not self._done.wait(0.005):
            try:
                status, headers = self.ask()
            except (OSError, http.client.HTTPException) as error:
                self.errors.append(error)
            else:
                self.answers.append((status, headers["x-bundle-digest"]))
                self.pids.add(int(headers["x-served-by"]))

    def ask(self) -> tuple[int, Mapping[str, str]]:
        return send_request("127.0.0.1", self._port, "POST", "/v1/models/sides:predict", QUESTION)[:2]

    def __enter__(self) -> Client:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self.join()


class Keeper(Client):
    """A client that keeps its connection until the server closes it."""

    def __init__(self, port: int) -> None:
        super().__init__(port)
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)

    def ask(self) -> tuple[int, Mapping[str, str]]:
        self._connection.request("POST", "/v1/models/sides:predict", json.dumps(QUESTION))
        answer = self._connection.getresponse()
        answer.read()
        if answer.will_close:
            self._connection.close()
        return answer.status, {name.lower(): value for name, value in answer.headers.items()}

    def __exit__(self, *words: object) -> None:
        super().__exit__(*words)
        self._connection.close()


def test_candidate_is_compared_with_the_champion_and_then_reused(
    project: ProjectFolder, live: LiveService, second: Run
) -> None:
    assert second.verdict()["baseline"] == {"kind": "champion", "bundle": live.bundle}
    assert "champion changed" in second.read().steps["evaluate"].reason
    assert project.plan("--until", "evaluate", *NEXT)["evaluate"] == ("reuse", f"unchanged since {second.id}")


def _champion(project: ProjectFolder, name: str = "champion") -> str:
    return read_registry(project.runs, "").names[name].bundle


def test_bundle_is_replaced_and_rolled_back_without_failed_requests(
    project: ProjectFolder, live: LiveService, first: Run, second: Run
) -> None:
    old, new = first.bundle().digest, second.bundle().digest
    with Client(live.port) as client:
        stderr = project.deploy(second).stderr
        assert "a new process takes over: the bundle has changed" in stderr
        assert (_champion(project), _champion(project, "previous")) == (new, old)
        assert "; it gets all requests again" in project.pipe("registry", "rollback").stdout
    assert client.errors == []
    assert {status for status, _ in client.answers} == {200}
    order = [bundle for bundle, _ in itertools.groupby(bundle for _, bundle in client.answers)]
    assert order in ([old, new, old], [old, new]), "each change once; the way back may come after the last answer"
    found = read_live(project.runs)
    assert found is not None
    assert (found.bundle, found.run, found.port) == (old, first.id, live.port)
    assert project.request("/v1/models/sides:predict", QUESTION)[1]["x-bundle-digest"] == old
    assert _champion(project) == old


@pytest.mark.long
def test_new_process_takes_over_the_port_without_failed_requests(
    project: ProjectFolder, live: LiveService, first: Run
) -> None:
    with Client(live.port) as client, Keeper(live.port) as keeper:
        stderr = project.pipe("deploy", first.id, f"deploy.port={project.port}", "serve.page=false").stderr
    assert "a new process takes over: packages, the service's own source or its options have changed" in stderr
    assert f"took over from pid {live.pid} (bundle {live.bundle[:12]})" in stderr
    new = read_live(project.runs)
    assert new is not None
    for one in (client, keeper):
        assert one.errors == []
        assert {status for status, _ in one.answers} == {200}
        assert one.pids == {live.pid, new.pid}
    assert not live.alive


@pytest.mark.long
def test_canary_gets_its_share_until_promoted_or_rolled_back(
    project: ProjectFolder, live: LiveService, first: Run, second: Run
) -> None:
    words = (
        "deploy",
        second.id,
        f"deploy.port={project.port}",
        "rollout.canary_percent=30",
        f"serve.shadow={first.id}",
    )
    stderr, run = project.pipe(*words).stderr, project.latest
    assert f"canary at {live.url}: 0.3 of the requests, the rest to bundle {live.bundle[:12]}" in stderr
    assert _champion(project) == live.bundle, "a canary is no champion yet"
    with Client(live.port) as client:
        wait_for(lambda: len(client.answers) > 60)
    share = sum(bundle == second.bundle().digest for _, bundle in client.answers) / len(client.answers)
    assert 0.02 < share < 0.7
    status = project.pipe("status").stdout
    assert f"canary: 0.3 of the requests to run {run.id}" in status
    assert f"shadow: bundle {live.bundle[:12]} gave the same answer to " in status
    assert f"the canary of run {run.id} has ended" in project.pipe("registry", "rollback").stdout
    assert _answers(project, 20) == {live.bundle}
    project.pipe(*words)
    assert "; it gets all requests" in project.pipe("registry", "promote").stdout
    assert _answers(project, 20) == {second.bundle().digest} == {_champion(project)}


def _answers(project: ProjectFolder, count: int) -> set[str]:
    return {project.request("/v1/models/sides:predict", QUESTION)[1]["x-bundle-digest"] for _ in range(count)}


def test_stop_ends_the_service_and_status_states_it(project: ProjectFolder, live: LiveService) -> None:
    assert json.loads(project.pipe("status", "-o", "json").stdout)["service"]["alive"] is True
    assert f"stopped sides at {live.url} (pid {live.pid})" in project.pipe("stop").stdout
    assert not live.alive
    assert json.loads(project.pipe("status", "-o", "json").stdout)["service"] is None
    assert "no service is live" in project.pipe("predict", expect=2).stderr


@pytest.mark.long
def test_dead_service_is_reported_and_restarted(project: ProjectFolder, live: LiveService, first: Run) -> None:
    service = psutil.Process(live.pid)
    service.kill()
    wait_for(lambda: not live.alive)
    assert "is gone; `pipe deploy` starts it" in project.pipe("status").stdout
    project.deploy(first)
    assert project.request("/v2/health/ready")[0] == 200


@pytest.mark.long
def test_next_free_port_is_used_when_the_port_is_taken(project: ProjectFolder, first: Run) -> None:
    project.pipe("stop")
    with socket.socket() as foreigner:
        foreigner.bind(("127.0.0.1", 0))
        foreigner.listen()
        port = foreigner.getsockname()[1]
        stderr = project.pipe("deploy", first.id, f"deploy.port={port}").stderr
    live = read_live(project.runs)
    assert live is not None
    assert live.port > port
    assert f"port {port} is taken; using {live.port}" in stderr
    assert project.request("/v2/health/ready")[0] == 200


def test_the_services_log_can_be_read(project: ProjectFolder, live: LiveService) -> None:
    assert f"bundle={live.bundle[:12]}" in project.pipe("logs", "service", "--run", live.run).stdout


def test_render_succeeds_without_a_cluster(project: ProjectFolder, first: Run, tmp_path: Path) -> None:
    words = ("deploy", first.id, f"deploy.image={IMAGE}", "--render")
    project.pipe(*words, env=NO_CLUSTER)
    rendered = digest_tree(project.latest.output("deploy") / "manifests")
    project.pipe(*words, str(tmp_path / "out"), env={**NO_CLUSTER, "PYTHONHASHSEED": "4242", "TZ": "Asia/Tokyo"})
    assert digest_tree(tmp_path / "out") == rendered, "another run at another time has the same bytes"
    assert "kustomization.yaml" in rendered


@pytest.mark.long
def test_commands_use_the_api_keys_and_tls_of_the_service(
    project: ProjectFolder, live: LiveService, first: Run
) -> None:
    certificate = certificates.make(project.folder, "localhost")
    (project.folder / "keys").write_text("a-key-of-the-tests\n")
    words = ["serve.api_keys=keys", "serve.tls_certificate=tls.crt", "serve.tls_key=tls.key"]
    stderr = project.pipe("deploy", first.id, f"deploy.port={project.port}", *words).stderr
    closed = read_live(project.runs)
    assert closed is not None
    assert f"took over from pid {live.pid}" in stderr, "the same bundle, but other options"
    assert closed.url == f"https://127.0.0.1:{project.port}"
    assert len(json.loads(project.pipe("predict", "-o", "json").stdout)["predictions"]) == 2, "all examples"
    stranger = Access(tls_certificate=str(certificate.certificate))
    assert send_request("127.0.0.1", project.port, "GET", "/v2", access=stranger)[0] == 401
    assert send_request("127.0.0.1", project.port, "GET", "/v2", access=closed.access)[0] == 200
    stderr = project.pipe("deploy", first.id, f"deploy.port={project.port}", *words).stderr
    assert f"already live at {closed.url}" in stderr
    assert "a-key-of-the-tests" not in (project.runs / "live.json").read_text()
