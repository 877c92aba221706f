from __future__ import annotations

import http.client
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from pipeline.contract.bundle import Bundle, open_bundle
from tests.serve.conftest import Launcher, Running
from tests.serve.load_clients import SECONDS, Clients, GrpcLoad, Load

TOKEN = "a-token-of-more-than-32-characters"


@dataclass(frozen=True)
class AdminClient:
    """A service, and a client of its admin port."""

    running: Running
    admin: httpx.Client
    public: httpx.Client

    def send(self, path: str, status: int = 200, **fields: Any) -> Any:
        answer = self.admin.post(path, json={"model": "tiny", **fields})
        assert answer.status_code == status, answer.text
        return answer.json()

    def load(self, path: Path) -> str:
        version: str = self.send("/load", bundle=str(path))["version"]
        return version

    @property
    def status(self) -> Any:
        return self.admin.get("/").json()["models"]["tiny"]

    def ask(self, request_id: str = "", version: str = "") -> httpx.Response:
        path = f"/v2/models/tiny/versions/{version}/infer" if version else "/v2/models/tiny/infer"
        tensor = {"name": "image", "shape": [1, 1, 8, 8], "datatype": "FP32", "data": [0.5] * 64}
        headers = {"x-request-id": request_id} if request_id else {}
        return self.public.post(path, json={"inputs": [tensor]}, headers=headers)

    def digest(self, **words: str) -> str:
        answer = self.ask(**words)
        assert answer.status_code == 200, answer.text
        return answer.headers["x-bundle-digest"]


@pytest.fixture(scope="module")
def service(
    module_launcher: Launcher,
    bundle_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    free_ports: Callable[[int], list[int]],
) -> Iterator[AdminClient]:
    token = tmp_path_factory.mktemp("admin") / "token"
    token.touch(0o600)
    token.write_text(TOKEN)
    (port,) = free_ports(1)
    running = module_launcher(bundle_path, options=("--admin", str(port), "--admin-token", str(token)))
    headers = {"authorization": f"Bearer {TOKEN}"}
    with (
        httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=SECONDS) as admin,
        httpx.Client(base_url=running.url, timeout=SECONDS) as public,
    ):
        yield AdminClient(running, admin, public)
    assert running.stop() == 0


@pytest.fixture
def client(service: AdminClient, bundle_path: Path) -> AdminClient:
    """With the digits bundle answering, whatever the test before has done."""
    service.send("/shadow")
    service.send("/switch", version=service.load(bundle_path))
    return service


@pytest.fixture(scope="module")
def other(other_path: Path) -> Bundle:
    return open_bundle(other_path)


def test_without_the_token_nothing_is_reported_and_nothing_done(client: AdminClient) -> None:
    for given in ("", "Bearer x", TOKEN, "Basic Og=="):
        for method, path in (("GET", "/"), ("POST", "/load"), ("POST", "/nothing")):
            answer = client.admin.request(method, path, headers={"authorization": given})
            assert answer.status_code == 401
            assert answer.headers["www-authenticate"].startswith("Bearer")
            assert answer.json() == {"error": "the admin interface needs its token: authorization: Bearer …"}


@pytest.mark.parametrize("path", ["/load", "/switch", "/admin"])
def test_the_public_port_knows_nothing_of_it(client: AdminClient, path: str) -> None:
    headers = {"authorization": f"Bearer {TOKEN}"}
    assert client.public.post(path, headers=headers).status_code == 404


@pytest.mark.parametrize(
    ("path", "fields", "status", "sentence"),
    [
        ("/load", {}, 400, "bundle: must be a string"),
        ("/load", {"bundle": "runs/x"}, 400, "'runs/x' is not an absolute path"),
        ("/load", {"bundle": "/nowhere"}, 422, "/nowhere: not a bundle"),
        ("/load", {"bundle": "/x", "model": "big"}, 404, "no model 'big'"),
        ("/switch", {"version": "99"}, 404, "has no version '99'"),
        ("/switch", {"version": 1}, 400, "version: must be a string"),
        ("/canary", {"version": "1", "share": 1}, 400, "share: must be a number from 0 to below 1"),
        ("/canary", {"version": "1", "share": True}, 400, "share: must be a number"),
        ("/shadow", {"bundle": "/x", "share": 1.5}, 400, "share: must be a number from 0 to at most 1"),
        ("/forgotten", {}, 404, "/forgotten: not found; there are /, /load, /switch, /canary, /shadow, /forget"),
    ],
)
def test_what_cannot_be_done_is_refused_with_its_reason(
    client: AdminClient, path: str, fields: dict[str, Any], status: int, sentence: str
) -> None:
    before = client.status
    assert sentence in client.send(path, status, **fields)["error"]
    assert client.status == before


def test_what_is_no_json_or_no_post_is_refused(client: AdminClient) -> None:
    assert client.admin.post("/load", content=b"{").status_code == 400
    assert client.admin.post("/load", content=b"[]").status_code == 400
    assert client.admin.get("/load").headers["allow"] == "POST"


def test_the_current_version_cannot_be_its_own_canary(client: AdminClient) -> None:
    answer = client.send("/canary", 409, version=client.status["current"], share=0.1)
    assert "gets all requests already" in answer["error"]


def test_a_bundle_is_loaded_beside_switched_to_and_back(
    client: AdminClient, bundle: Bundle, other: Bundle, other_path: Path
) -> None:
    old = client.status["current"]
    new = client.load(other_path)
    assert client.digest() == bundle.digest, "loading changes nothing for clients"
    assert client.digest(version=new) == other.digest
    assert client.load(other_path) == new, "once is enough"
    client.send("/switch", version=new)
    assert (client.digest(), client.ask().json()["model_version"]) == (other.digest, new)
    assert (client.status["current"], client.status["previous"]) == (new, old)
    assert client.digest(version=old) == bundle.digest
    client.send("/switch", version=old)
    assert client.digest() == bundle.digest
    client.send("/forget")
    assert set(client.status["versions"]) == {old, new}, "the one before stays loaded"


def test_a_bundle_that_fails_leaves_the_old_one_serving_and_shows_why(
    client: AdminClient, bundle: Bundle, other_path: Path, tmp_path: Path, seal: Callable[[Path], str]
) -> None:
    spoilt = Path(shutil.copytree(other_path, tmp_path / "spoilt"))
    golden = (spoilt / "golden.json").read_text()
    (spoilt / "golden.json").write_text(golden.replace('"digit": ', '"digit": 1'))
    assert "golden.json: content changed since export" in client.send("/load", 422, bundle=str(spoilt))["error"]
    seal(spoilt)
    assert "the model does not answer as it did at export" in client.send("/load", 422, bundle=str(spoilt))["error"]
    assert client.digest() == bundle.digest
    assert client.public.get("/v2/health/ready").json()["ready"]


def test_a_bundle_in_the_same_folder_with_another_codec_is_served_with_its_own(
    client: AdminClient, own_bundle: Path, seal: Callable[[Path], str], picture: list[Any]
) -> None:
    codec = (own_bundle / "codec.py").read_text()
    (own_bundle / "codec.py").write_text(codec + "\nCHANGED = 1\n")
    seal(own_bundle)
    client.send("/switch", version=client.load(own_bundle))
    (own_bundle / "codec.py").write_text(codec + '\nDigitsCodec.encode = lambda self, outputs: ["no"]\n')
    seal(own_bundle)
    assert "golden requests" in client.send("/load", 422, bundle=str(own_bundle))["error"]


def test_a_canary_answers_its_share_the_same_ids_always(
    client: AdminClient, bundle: Bundle, other: Bundle, other_path: Path
) -> None:
    client.send("/canary", version=client.load(other_path), share=0.3)
    ids = [f"id-{number}" for number in range(60)]
    found = {request_id: client.digest(request_id=request_id) for request_id in ids}
    share = sum(digest == other.digest for digest in found.values()) / len(ids)
    assert 0.1 < share < 0.5
    assert {request_id: client.digest(request_id=request_id) for request_id in ids} == found
    client.send("/canary", version=client.status["canary"]["version"], share=0.0)
    assert {client.digest(request_id=request_id) for request_id in ids} == {bundle.digest}
    assert client.status["canary"] is None


def test_a_canary_answers_over_grpc_and_through_the_codec_too(
    client: AdminClient, bundle: Bundle, other: Bundle, other_path: Path, picture: list[Any]
) -> None:
    client.send("/canary", version=client.load(other_path), share=0.5)
    for load in (
        GrpcLoad(client.running.grpc_port),
        Load(client.running.port, {"instances": [picture]}, keep_alive=True),
    ):
        with load.running(clients=2):
            load.answers(10, bundle=bundle.digest)
            load.answers(10, bundle=other.digest)
        assert load.failures == []


def test_a_shadow_is_reported_of_in_the_status_and_the_metrics(
    client: AdminClient, other: Bundle, other_path: Path
) -> None:
    client.send("/shadow", bundle=str(other_path))
    assert client.ask().status_code == 200
    for _ in range(1000):
        if (shadow := client.status["shadow"])["other"] == 1:
            break
    assert (shadow["bundle"], shadow["same"], shadow["dropped"]) == (other.digest, 0, 0)
    assert shadow["max_difference"] > 0
    client.send("/shadow", bundle=str(other_path))
    assert client.status["shadow"]["other"] == 1, "the same again goes on with its counts"
    metrics = client.public.get("/metrics").text
    assert f'pipe_shadow_requests_total{{digest="{other.digest}",model="tiny",result="other"}} 1.0' in metrics
    client.send("/shadow")
    assert client.status["shadow"] is None


@pytest.mark.parametrize("kind", ["kept connections", "new connections", "gRPC"])
def test_switched_under_load_each_request_is_answered_by_one_or_the_other(
    client: AdminClient, bundle: Bundle, other: Bundle, other_path: Path, picture: list[Any], kind: str
) -> None:
    load: Clients
    if kind == "gRPC":
        load = GrpcLoad(client.running.grpc_port)
    else:
        load = Load(client.running.port, {"instances": [picture]}, keep_alive=kind == "kept connections")
    with load.running(clients=4):
        load.answers(20, bundle=bundle.digest)
        version = client.load(other_path)
        client.send("/switch", version=version)
        switched = time.monotonic()
        load.answers(20, bundle=other.digest)
    assert load.failures == []
    assert {one.bundle for one in load.heard} == {bundle.digest, other.digest}
    assert {one.bundle for one in load.heard if one.sent > switched} == {other.digest}, "never back"


def test_a_token_that_others_may_read_stops_the_start(
    start: Launcher, bundle_path: Path, tmp_path: Path, free_ports: Callable[[int], list[int]]
) -> None:
    token = tmp_path / "token"
    token.write_text(TOKEN)
    os.chmod(token, 0o644)
    options = ("--admin", str(free_ports(1)[0]), "--admin-token", str(token))
    running = start(bundle_path, options=options, ready=False)
    running.wait_for("others can read it; to fix it: chmod 600")
    assert running.process.wait(SECONDS) == 2


def test_the_admin_port_is_of_this_machine_alone(client: AdminClient) -> None:
    port = client.admin.base_url.port
    assert port is not None
    connection = http.client.HTTPConnection("127.0.0.2", port, timeout=SECONDS)
    with pytest.raises(ConnectionRefusedError):
        connection.connect()
