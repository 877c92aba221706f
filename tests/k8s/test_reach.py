from __future__ import annotations

from typing import Any

import pytest

from k8s import serving
from pipeline.spec.access import Access
from pipeline.spec.bundle import Bundle
from pipeline.spec.errors import ConfigError

from .conftest import Configure
from .schemas import validate

DNS = 53


def made(config: Any, bundle: Bundle, kind: str) -> dict[str, Any]:
    spec: dict[str, Any] = next(
        item["spec"] for item in serving.objects(config, bundle, "twice:1") if item["kind"] == kind
    )
    return spec


def ways_out(deploy: dict[str, Any], configure: Configure, bundle: Bundle) -> list[dict[str, Any]]:
    rules = made(configure(deploy), bundle, "NetworkPolicy")["egress"]
    return [rule for rule in rules if {port["port"] for port in rule["ports"]} != {DNS}]


def test_nothing_but_the_dns_is_reached_unless_it_is_named(configure: Configure, bundle: Bundle) -> None:
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
def test_a_download_is_let_out_once(uri: str, open_: bool, configure: Configure, bundle: Bundle) -> None:
    deploy = {"mode": "inferenceservice", "storage_uri": uri}
    assert len(ways_out(deploy, configure, bundle)) == open_
    assert len(ways_out({**deploy, "egress": ["443"]}, configure, bundle)) == 1


@pytest.mark.parametrize("text", ["", "anywhere", "10.0.0.0:443", "443/tcp", "10.0.0.0/8"])
def test_what_names_no_port_is_refused(text: str, configure: Configure) -> None:
    with pytest.raises(ConfigError, match=r"deploy\.egress"):
        configure({"egress": [text]})


def test_clients_are_the_namespaces_that_are_named(configure: Configure, bundle: Bundle) -> None:
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
    route = made(configure({"expose": "gateway", "gateway": gateway}), bundle, "HTTPRoute")
    assert route["parentRefs"] == [parent]
    assert "hostnames" not in route
    named = made(configure({"expose": "gateway", "gateway": gateway, "hostname": "a.example"}), bundle, "HTTPRoute")
    assert named["hostnames"] == ["a.example"]


def test_models_are_asked_from_outside_and_metrics_are_not(configure: Configure, bundle: Bundle) -> None:
    route = made(configure({"expose": "gateway", "gateway": "edge"}), bundle, "HTTPRoute")
    matches = [match["path"]["value"] for rule in route["rules"] for match in rule["matches"]]
    ingress = made(configure({"expose": "ingress"}), bundle, "Ingress")
    paths = [path["path"] for path in ingress["rules"][0]["http"]["paths"]]
    assert matches == paths == ["/v1", "/v2"]


def test_an_ingress_names_its_class_only_where_one_is_given(configure: Configure, bundle: Bundle) -> None:
    assert "ingressClassName" not in made(configure({"expose": "ingress"}), bundle, "Ingress")
    given = made(configure({"expose": "ingress", "ingress_class": "nginx"}), bundle, "Ingress")
    assert given["ingressClassName"] == "nginx"


def test_without_a_word_there_is_no_way_in_from_outside(configure: Configure, bundle: Bundle) -> None:
    kinds = {item["kind"] for item in serving.objects(configure(), bundle, "twice:1")}
    assert not kinds & {"HTTPRoute", "Ingress", "ServiceMonitor"}


@pytest.mark.parametrize("deploy", [{}, {"mode": "inferenceservice"}])
def test_the_dns_is_reached_where_a_node_has_a_cache_of_it(
    deploy: dict[str, Any], configure: Configure, bundle: Bundle
) -> None:
    (rule,) = made(configure(deploy), bundle, "NetworkPolicy")["egress"]
    assert {"ipBlock": {"cidr": "169.254.20.10/32"}} in rule["to"]


def test_from_outside_as_much_is_let_in_and_waited_for_as_the_service_takes(
    configure: Configure, bundle: Bundle
) -> None:
    words = {"expose": "ingress", "answer_seconds": 300, "ingress_annotations": {"a.example/b": "c"}}
    found = serving.objects(configure(words), bundle, "twice:1")
    notes = next(item["metadata"]["annotations"] for item in found if item["kind"] == "Ingress")
    prefix = "nginx.ingress.kubernetes.io/proxy"
    assert notes[f"{prefix}-body-size"] == str(bundle.signature.limits.max_body_bytes)
    assert notes[f"{prefix}-read-timeout"] == notes[f"{prefix}-send-timeout"] == "300"
    assert notes["a.example/b"] == "c"
    route = made(configure({**words, "expose": "gateway", "gateway": "edge"}), bundle, "HTTPRoute")
    assert [rule["timeouts"] for rule in route["rules"]] == [{"request": "300s"}]


def test_an_ingress_ends_tls_with_the_secret_that_is_named(configure: Configure, bundle: Bundle) -> None:
    words = {"expose": "ingress", "hostname": "a.example", "ingress_secret": "cert"}
    assert made(configure(words), bundle, "Ingress")["tls"] == [{"hosts": ["a.example"], "secretName": "cert"}]


def test_who_asks_pods_that_encrypt_and_want_a_key_is_told(configure: Configure, bundle: Bundle) -> None:
    access = Access(api_keys="/keys", tls_certificate="/crt", tls_key="/key")
    config = configure({"service_monitor": True, "monitor_secret": "prometheus-key"})
    parts = {item["kind"]: item for item in serving.objects(config, bundle, "twice:1", access)}
    for item in parts.values():
        validate(item)
    assert {port["appProtocol"] for port in parts["Service"]["spec"]["ports"]} == {"https"}
    (endpoint,) = parts["ServiceMonitor"]["spec"]["endpoints"]
    assert endpoint["scheme"] == "https"
    assert endpoint["authorization"] == {"credentials": {"name": "prometheus-key", "key": "key"}}


@pytest.mark.parametrize(
    ("deploy", "access", "said"),
    [
        ({"service_monitor": True}, {"api_keys": "/keys"}, "deploy.monitor_secret"),
        ({"expose": "ingress"}, {"tls_certificate": "/crt", "tls_key": "/key"}, "deploy.ingress_secret"),
        ({"expose": "gateway", "gateway": "edge"}, {"tls_certificate": "/crt", "tls_key": "/key"}, "TLS ends before"),
    ],
)
def test_what_nobody_could_ask_is_refused(
    deploy: dict[str, Any], access: dict[str, str], said: str, configure: Configure, bundle: Bundle
) -> None:
    with pytest.raises(ConfigError, match=said):
        serving.objects(configure(deploy), bundle, "twice:1", Access(**access))
