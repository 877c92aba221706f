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
from pipeline.service.process import Live, read_live, request

from ..serve import certificates
from .walker import Walker, processes_of, wait_for

NO_CLUSTER = {"KUBECONFIG": "/nowhere"}
NEXT = ("train.seed=1", "train.processes=1", "evaluate.margin=0.5")
IMAGE = f"registry/sides@sha256:{'5' * 64}"
QUESTION = {"instances": [[0.0, 0.9]]}


@pytest.fixture(scope="module")
def town(road: Walker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Walker]:
    """Two runs with different bundles, the first of them live."""
    walker = road.copy(tmp_path_factory.mktemp("town") / "sides")
    walker.pipe("run", "--until", "package", *NEXT)
    try:
        yield walker
    finally:
        walker.stop()


@pytest.fixture
def first(town: Walker) -> Run:
    return all_runs(town.runs)[-1]


@pytest.fixture
def second(town: Walker) -> Run:
    """The run with another seed, whatever was deployed since."""
    return next(run for run in reversed(all_runs(town.runs)) if run.config.train.seed == 1)


@pytest.fixture
def live(town: Walker, first: Run) -> Live:
    """The first run's bundle, answering on the project's own port."""
    town.deploy(first)
    found = read_live(town.runs)
    assert found is not None
    assert found.port == town.port
    return found


class Client(threading.Thread):
    """Asks one question after the other, on a connection of its own each, until told to stop."""

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
        return request("127.0.0.1", self._port, "POST", "/v1/models/sides:predict", QUESTION)[:2]

    def __enter__(self) -> Client:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self.join()


class Keeper(Client):
    """Keeps its connection until an answer says that it closes."""

    def __init__(self, port: int) -> None:
        super().__init__(port)
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)

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


def test_the_next_candidate_is_compared_with_the_champion_and_then_reused(
    town: Walker, live: Live, second: Run
) -> None:
    assert second.verdict()["baseline"] == {"kind": "champion", "bundle": live.bundle}
    assert "champion changed" in second.read().steps["evaluate"].reason
    assert town.plan("--until", "evaluate", *NEXT)["evaluate"] == ("reuse", f"unchanged since {second.id}")


def _champion(town: Walker, name: str = "champion") -> str:
    return read_registry(town.runs, "").names[name].bundle


def test_a_new_bundle_is_swapped_in_and_rolled_back_in_the_same_process_and_no_request_fails(
    town: Walker, live: Live, first: Run, second: Run
) -> None:
    old, new = first.bundle().digest, second.bundle().digest
    with Client(live.port) as client:
        said = town.deploy(second).stderr
        assert f"switched from bundle {old[:12]}, which stays loaded" in said
        assert (_champion(town), _champion(town, "previous")) == (new, old)
        assert "it was still loaded and gets all requests again" in town.pipe("rollback").stdout
    assert client.errors == []
    assert {status for status, _ in client.answers} == {200}
    order = [bundle for bundle, _ in itertools.groupby(bundle for _, bundle in client.answers)]
    assert order in ([old, new, old], [old, new]), "each change once; the way back may come after the last answer"
    found = read_live(town.runs)
    assert found is not None
    assert (found.pid, found.bundle, found.run) == (live.pid, old, first.id)
    assert town.ask("/v1/models/sides:predict", QUESTION)[1]["x-bundle-digest"] == old
    assert _champion(town) == old


def test_other_options_need_a_new_process_which_takes_the_port_over_and_no_request_fails(
    town: Walker, live: Live, first: Run
) -> None:
    with Client(live.port) as client, Keeper(live.port) as keeper:
        said = town.pipe("deploy", first.id, f"deploy.port={town.port}", "serve.page=false").stderr
    assert "a new process takes over: packages, the service's own source or its options have changed" in said
    assert f"took over from pid {live.pid} (bundle {live.bundle[:12]})" in said
    new = read_live(town.runs)
    assert new is not None
    for one in (client, keeper):
        assert one.errors == []
        assert {status for status, _ in one.answers} == {200}
        assert one.pids == {live.pid, new.pid}
    assert not live.alive
    assert not Path(live.token).exists()


@pytest.mark.long
def test_a_canary_gets_its_share_until_it_is_promoted_or_ended(
    town: Walker, live: Live, first: Run, second: Run
) -> None:
    words = ("deploy", second.id, f"deploy.port={town.port}", "serve.canary=30%", f"serve.shadow={first.id}")
    said, run = town.pipe(*words).stderr, town.latest
    assert f"canary at {live.url}: 0.3 of the requests, the rest to bundle {live.bundle[:12]}" in said
    assert _champion(town) == live.bundle, "a canary is no champion yet"
    with Client(live.port) as client:
        wait_for(lambda: len(client.answers) > 60, seconds=20)
    share = sum(bundle == second.bundle().digest for _, bundle in client.answers) / len(client.answers)
    assert 0.02 < share < 0.7
    status = town.pipe("status").stdout
    assert f"canary: 0.3 of the requests to run {run.id}" in status
    assert f"shadow: bundle {live.bundle[:12]} gave the same answer to " in status
    assert f"the canary of run {run.id} has ended" in town.pipe("rollback").stdout
    assert _answers(town, 20) == {live.bundle}
    town.pipe(*words)
    assert "; it gets all requests" in town.pipe("promote").stdout
    assert _answers(town, 20) == {second.bundle().digest} == {_champion(town)}


def _answers(town: Walker, count: int) -> set[str]:
    return {town.ask("/v1/models/sides:predict", QUESTION)[1]["x-bundle-digest"] for _ in range(count)}


def test_a_bundle_that_fails_leaves_the_old_one_live(town: Walker, live: Live, first: Run, second: Run) -> None:
    said = town.deploy(second, expect=2, env={"TINY_CODEC": "broken"}).stderr
    assert "golden requests failed: ValueError: this codec is broken here" in said.splitlines()[-1]
    assert read_live(town.runs) == live
    assert _answers(town, 1) == {first.bundle().digest} == {_champion(town)}


def test_a_process_that_fails_leaves_the_old_one_live(town: Walker, live: Live, first: Run, second: Run) -> None:
    words = ("deploy", second.id, f"deploy.port={town.port}", "serve.page=false")
    said = town.pipe(*words, expect=1, env={"TINY_CODEC": "broken"}).stderr
    assert "the service ended at its start" in said.splitlines()[-1]
    assert "this codec is broken here" in said
    assert read_live(town.runs) == live
    assert _answers(town, 1) == {first.bundle().digest} == {_champion(town)}
    assert processes_of(town.latest) == [], "the one that failed was ended"


def test_stop_ends_the_service_and_status_says_so(town: Walker, live: Live) -> None:
    assert json.loads(town.pipe("status", "-o", "json").stdout)["service"]["alive"] is True
    assert f"ended sides at {live.url} (pid {live.pid})" in town.pipe("stop").stdout
    assert not live.alive
    assert json.loads(town.pipe("status", "-o", "json").stdout)["service"] is None
    assert "no service is live" in town.pipe("predict", expect=2).stderr


def test_a_service_that_died_is_told_and_started_again(town: Walker, live: Live, first: Run) -> None:
    service = psutil.Process(live.pid)
    service.kill()
    wait_for(lambda: not live.alive, seconds=10)
    assert "is gone; `pipe deploy` starts it" in town.pipe("status").stdout
    town.deploy(first)
    assert town.ask("/v2/health/ready")[0] == 200


def test_a_taken_port_is_left_alone_and_the_next_free_one_said_aloud(town: Walker, first: Run) -> None:
    town.pipe("stop")
    with socket.socket() as foreigner:
        foreigner.bind(("127.0.0.1", 0))
        foreigner.listen()
        port = foreigner.getsockname()[1]
        said = town.pipe("deploy", first.id, f"deploy.port={port}").stderr
    live = read_live(town.runs)
    assert live is not None
    assert live.port > port
    assert f"port {port} is taken; using {live.port}" in said
    assert town.ask("/v2/health/ready")[0] == 200


def test_the_services_log_can_be_read(town: Walker, live: Live) -> None:
    assert f"bundle={live.bundle[:12]}" in town.pipe("log", "service", "--run", live.run).stdout


def test_without_a_cluster_the_manifests_are_there_and_the_exit_status_says_it_is_not_done(
    town: Walker, first: Run
) -> None:
    target = ("deploy.target=kubernetes", f"deploy.image={IMAGE}")
    done = town.pipe("deploy", first.id, *target, expect=1, env=NO_CLUSTER)
    manifests = town.latest.output("deploy") / "manifests"
    assert f"kubectl apply --server-side -k {manifests}" in done.stderr.splitlines()[-1]
    assert (manifests / "kustomization.yaml").is_file()
    assert IMAGE in "".join(path.read_text() for path in manifests.iterdir())


def test_only_rendering_is_a_success(town: Walker, first: Run, tmp_path: Path) -> None:
    words = ("deploy", first.id, f"deploy.image={IMAGE}", "--render")
    town.pipe(*words, env=NO_CLUSTER)
    rendered = {path.name for path in (town.latest.output("deploy") / "manifests").iterdir()}
    town.pipe(*words, str(tmp_path / "out"), env=NO_CLUSTER)
    assert {path.name for path in (tmp_path / "out").iterdir()} == rendered
    assert "kustomization.yaml" in rendered


def test_keys_and_tls_are_asked_of_others_and_known_to_our_own_commands(town: Walker, live: Live, first: Run) -> None:
    certificate = certificates.make(town.folder, "localhost")
    (town.folder / "keys").write_text("a-key-of-the-tests\n")
    words = ["serve.api_keys=keys", "serve.tls_certificate=tls.crt", "serve.tls_key=tls.key"]
    said = town.pipe("deploy", first.id, f"deploy.port={town.port}", *words).stderr
    closed = read_live(town.runs)
    assert closed is not None
    assert f"took over from pid {live.pid}" in said, "as safe as it was asked to be, though the bundle is the same"
    assert closed.url == f"https://127.0.0.1:{town.port}"
    assert json.loads(town.pipe("predict", "-o", "json").stdout)["predictions"]
    stranger = Access(tls_certificate=str(certificate.certificate))
    assert request("127.0.0.1", town.port, "GET", "/v2", access=stranger)[0] == 401
    assert request("127.0.0.1", town.port, "GET", "/v2", access=closed.access)[0] == 200
    said = town.pipe("deploy", first.id, f"deploy.port={town.port}", *words).stderr
    assert f"already live at {closed.url}" in said
    assert "a-key-of-the-tests" not in (town.runs / "live.json").read_text()
