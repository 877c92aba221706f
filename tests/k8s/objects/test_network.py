from __future__ import annotations

import base64
import hashlib
from pathlib import Path
from typing import Any

import pytest

from k8s.deploy import deploy
from k8s.objects import network, serving
from pipeline.contract.bundle import Bundle
from pipeline.contract.settings.access import Access
from pipeline.system.errors import ConfigError

from ..api_server import ApiServer
from ..conftest import Configure
from ..invariants import check
from ..schemas import validate

KEY, PRIVATE = "a-key-of-the-tests", "-----BEGIN PRIVATE KEY-----\nsecret\n"


@pytest.fixture
def access(tmp_path: Path) -> Access:
    for name, text in (("keys", f"{KEY}\n"), ("crt", "-----BEGIN CERTIFICATE-----\n"), ("key", PRIVATE)):
        (tmp_path / name).write_text(text)
    return Access(api_keys=str(tmp_path / "keys"), tls_certificate=str(tmp_path / "crt"), tls_key=str(tmp_path / "key"))


def _pod(objects: list[dict[str, Any]]) -> dict[str, Any]:
    pod: dict[str, Any] = next(item for item in objects if item["kind"] == "Deployment")["spec"]["template"]["spec"]
    return pod


def test_the_service_finds_the_mounted_secret(configure: Configure, bundle: Bundle, access: Access) -> None:
    objects = serving.serving_objects(configure(), bundle, "twice:1", access)
    (secret,) = network.access_secrets(configure(), access)
    for item in (*objects, secret):
        validate(item)
    pod = _pod(objects)
    container = pod["containers"][0]
    mount = next(one for one in container["volumeMounts"] if one["name"] == "access")
    volume = next(one for one in pod["volumes"] if one["name"] == "access")
    assert volume["secret"]["secretName"] == secret["metadata"]["name"]
    assert mount["readOnly"]
    assert secret["immutable"], "pods of each version keep their own"
    words = container["args"][-6:]  # after those of the ConfigMap
    paths = words[1::2]
    assert words[::2] == ["--api-keys", "--tls-certificate", "--tls-key"]
    assert sorted(paths) == sorted(f"{mount['mountPath']}/{name}" for name in secret["data"])


def test_probes_use_the_health_port_which_has_no_tls(configure: Configure, bundle: Bundle, access: Access) -> None:
    container = _pod(serving.serving_objects(configure(), bundle, "twice:1", access))["containers"][0]
    assert "--health-port=8082" in container["args"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"] == {"path": container[probe]["httpGet"]["path"], "port": 8082}


def test_the_secret_holds_hashes_of_the_keys(configure: Configure, access: Access) -> None:
    (secret,) = network.access_secrets(configure(), access)
    data = {name: base64.b64decode(text).decode() for name, text in secret["data"].items()}
    assert data["api-keys"] == f"sha256:{hashlib.sha256(KEY.encode()).hexdigest()}\n"
    assert data["tls.key"] == PRIVATE


def test_without_keys_and_tls_there_is_no_secret(configure: Configure, bundle: Bundle) -> None:
    assert network.access_secrets(configure(), Access()) == []
    assert network.create_secret_command(configure(), Access()) == ""
    pod = _pod(serving.serving_objects(configure(), bundle, "twice:1"))
    assert not [word for word in pod["containers"][0]["args"] if word.startswith(("--api", "--tls"))]
    assert [volume["name"] for volume in pod["volumes"]] == ["tmp"]


def test_tls_with_kserve_is_refused(configure: Configure, bundle: Bundle, access: Access) -> None:
    config = configure({"target": "kserve"})
    with pytest.raises(ConfigError, match="KServe's gateway ends TLS"):
        serving.serving_objects(config, bundle, "twice:1", access)
    for item in serving.serving_objects(config, bundle, "twice:1", Access(api_keys=access.api_keys)):
        validate(item)


def test_a_deployment_applies_the_secret_first_and_sends_a_key(
    api: ApiServer, model: Any, configure: Configure, bundle: Bundle, access: Access, tmp_path: Path
) -> None:
    api.service, api.unready_polls = model, 0
    record = deploy(configure(), bundle, "twice:1", tmp_path / "out", False, print, access)
    assert record["applied"][0] == f"secret/{network.secret_name(configure(), access)}"
    assert {headers["x-api-key"] for headers in api.proxied} == {KEY}
    assert any("/services/https:twice:http/proxy/" in path for _, path, _, _ in api.requests)


@pytest.mark.usefixtures("no_cluster")
def test_no_rendered_file_contains_a_secret(
    configure: Configure, bundle: Bundle, access: Access, tmp_path: Path
) -> None:
    reports: list[str] = []
    deploy(configure(), bundle, "twice:1", tmp_path / "out", True, reports.append, access)
    written = "".join(file.read_text() for file in (tmp_path / "out").iterdir())
    assert KEY not in written
    assert "PRIVATE" not in written
    assert "twice-access" in written
    name = network.secret_name(configure(), access)
    assert name in written
    wanted = f"kubectl --namespace default create secret generic {name} --from-file=api-keys="
    assert any(wanted in line and f"--from-file=tls.key={access.tls_key}" in line for line in reports)


def test_pods_with_samples_may_send_them(configure: Configure, bundle: Bundle) -> None:
    to = {"sample": 0.5, "sample_to": "s3://bucket/live", "sample_url": "http://events.local/"}
    objects = serving.serving_objects(configure(serve={**to, "workers": 2}), bundle, "twice:1")
    container = _pod(objects)["containers"][0]
    assert container["args"][-8:] == [
        "--sample", "0.5", "--sample-max-bytes", str(1 << 30), "--sample-to", "s3://bucket/live", "--sample-url",
        "http://events.local/",
    ]  # fmt: skip
    assert container["resources"]["limits"]["memory"] == "768Mi"
    policy = next(item["spec"] for item in objects if item["kind"] == "NetworkPolicy")
    ports = [rule["ports"][0]["port"] for rule in policy["egress"] if "to" not in rule]
    assert ports[-2:] == [443, 80]
    check(objects)


def test_samples_of_pods_need_a_url(configure: Configure, bundle: Bundle) -> None:
    with pytest.raises(
        ConfigError, match=r"serve.sample_to=samples: a pod's folders end with it; .* name an fsspec URL"
    ):
        serving.serving_objects(configure(serve={"sample": 1}), bundle, "twice:1")
    serving.serving_objects(configure(serve={"sample": 1, "sample_to": "", "sample_url": "http://x"}), bundle, "i:1")


def test_serve_settings_reach_the_command_line(configure: Configure, bundle: Bundle, access: Access) -> None:
    config = configure(serve={"page": False, "log_requests": 0.01})
    objects = serving.serving_objects(config, bundle, "twice:1", Access(api_keys=access.api_keys))
    container, settings = _pod(objects)["containers"][0], next(item for item in objects if item["kind"] == "ConfigMap")
    assert container["args"][-3:] == ["--no-page", "--api-keys", "/access/api-keys"]
    assert settings["data"]["LOG_REQUESTS"] == "0.01"
    check(objects)  # the service takes this command line


def test_a_shadow_on_a_cluster_is_refused(configure: Configure, bundle: Bundle) -> None:
    config = configure(serve={"shadow": "run"})
    with pytest.raises(ConfigError, match=r"serve\.shadow: is for the local service"):
        serving.serving_objects(config, bundle, "twice:1")


DNS = 53


def made(config: Any, bundle: Bundle, kind: str) -> dict[str, Any]:
    spec: dict[str, Any] = next(
        item["spec"] for item in serving.serving_objects(config, bundle, "twice:1") if item["kind"] == kind
    )
    return spec


def ways_out(deploy: dict[str, Any], configure: Configure, bundle: Bundle) -> list[dict[str, Any]]:
    rules = made(configure(deploy), bundle, "NetworkPolicy")["egress"]
    return [rule for rule in rules if {port["port"] for port in rule["ports"]} != {DNS}]


def test_egress_allows_only_dns_and_configured_destinations(configure: Configure, bundle: Bundle) -> None:
    assert ways_out({}, configure, bundle) == []
    tcp = {"protocol": "TCP"}
    assert ways_out({"egress": ["443", "10.0.0.0/8:4318"]}, configure, bundle) == [
        {"ports": [{"port": 443, **tcp}]},
        {"to": [{"ipBlock": {"cidr": "10.0.0.0/8"}}], "ports": [{"port": 4318, **tcp}]},
    ]


@pytest.mark.parametrize(
    ("uri", "open_"),
    [("s3://a/b", True), ("https://a/b", True), ("pvc://a/b", False), ("oci://a/b@sha256:" + "1" * 64, False)],
)
def test_storage_download_opens_one_egress_rule(uri: str, open_: bool, configure: Configure, bundle: Bundle) -> None:
    deploy = {"target": "kserve", "storage_uri": uri}
    assert len(ways_out(deploy, configure, bundle)) == open_
    assert len(ways_out({**deploy, "egress": ["443"]}, configure, bundle)) == 1


@pytest.mark.parametrize("text", ["", "anywhere", "10.0.0.0:443", "443/tcp", "10.0.0.0/8"])
def test_an_egress_without_a_port_is_refused(text: str, configure: Configure) -> None:
    with pytest.raises(ConfigError, match=r"deploy\.egress"):
        configure({"egress": [text]})


def test_only_configured_namespaces_may_call(configure: Configure, bundle: Bundle) -> None:
    assert "from" not in made(configure(), bundle, "NetworkPolicy")["ingress"][0]
    (rule,) = made(configure({"clients": ["shop", "office"]}), bundle, "NetworkPolicy")["ingress"]
    (names,) = rule["from"][0]["namespaceSelector"]["matchExpressions"]
    assert (names["operator"], names["values"]) == ("In", ["office", "shop"])


@pytest.mark.parametrize(
    ("gateway", "parent"), [("edge", {"name": "edge"}), ("infra/edge", {"name": "edge", "namespace": "infra"})]
)
def test_a_route_binds_to_the_gateway(
    gateway: str, parent: dict[str, str], configure: Configure, bundle: Bundle
) -> None:
    route = made(configure({"gateway": gateway}), bundle, "HTTPRoute")
    assert route["parentRefs"] == [parent]
    assert "hostnames" not in route
    named = made(configure({"gateway": gateway, "hostname": "a.example"}), bundle, "HTTPRoute")
    assert named["hostnames"] == ["a.example"]


def test_metrics_are_not_exposed(configure: Configure, bundle: Bundle) -> None:
    route = made(configure({"gateway": "edge"}), bundle, "HTTPRoute")
    matches = [match["path"]["value"] for rule in route["rules"] for match in rule["matches"]]
    ingress = made(configure({"ingress_class": "default"}), bundle, "Ingress")
    paths = [path["path"] for path in ingress["rules"][0]["http"]["paths"]]
    assert matches == paths == ["/v1", "/v2"]


def test_an_ingress_of_the_default_class_names_none(configure: Configure, bundle: Bundle) -> None:
    assert "ingressClassName" not in made(configure({"ingress_class": "default"}), bundle, "Ingress")
    given = made(configure({"ingress_class": "nginx"}), bundle, "Ingress")
    assert given["ingressClassName"] == "nginx"


def test_by_default_nothing_is_exposed(configure: Configure, bundle: Bundle) -> None:
    kinds = {item["kind"] for item in serving.serving_objects(configure(), bundle, "twice:1")}
    assert not kinds & {"HTTPRoute", "Ingress"}


@pytest.mark.parametrize("deploy", [{}, {"target": "kserve"}])
def test_a_dns_cache_on_the_node_is_reachable(deploy: dict[str, Any], configure: Configure, bundle: Bundle) -> None:
    (rule,) = made(configure(deploy), bundle, "NetworkPolicy")["egress"]
    assert {"ipBlock": {"cidr": "169.254.20.10/32"}} in rule["to"]


def test_proxies_allow_the_body_size_and_deadline_of_the_service(configure: Configure, bundle: Bundle) -> None:
    words = {"ingress_class": "default"}
    serve = {"deadline_seconds": 299.5}
    found = serving.serving_objects(configure(words, serve=serve), bundle, "twice:1")
    notes = next(item["metadata"]["annotations"] for item in found if item["kind"] == "Ingress")
    prefix = "nginx.ingress.kubernetes.io/proxy"
    assert notes[f"{prefix}-body-size"] == str(bundle.signature.limits.max_body_bytes)
    assert notes[f"{prefix}-read-timeout"] == notes[f"{prefix}-send-timeout"] == "300"
    route = made(configure({"gateway": "edge"}, serve=serve), bundle, "HTTPRoute")
    assert [rule["timeouts"] for rule in route["rules"]] == [{"request": "300s"}]


def test_the_service_states_that_its_pods_use_tls(configure: Configure, bundle: Bundle, access: Access) -> None:
    parts = {item["kind"]: item for item in serving.serving_objects(configure(), bundle, "twice:1", access)}
    for item in parts.values():
        validate(item)
    assert {port["appProtocol"] for port in parts["Service"]["spec"]["ports"]} == {"https"}


@pytest.mark.parametrize(
    ("deploy", "files", "message"),
    [
        ({"ingress_class": "default"}, ["tls_certificate", "tls_key"], "by deploy.overlay to the Ingress"),
        ({"gateway": "edge"}, ["tls_certificate", "tls_key"], "TLS ends before"),
    ],
)
def test_settings_without_a_way_to_call_the_service_are_refused(
    deploy: dict[str, Any], files: list[str], message: str, configure: Configure, bundle: Bundle, access: Access
) -> None:
    some = Access(**{name: getattr(access, name) for name in files})
    with pytest.raises(ConfigError, match=message):
        serving.serving_objects(configure(deploy), bundle, "twice:1", some)
