from __future__ import annotations

from typing import Any

import pytest

from k8s import serving
from pipeline.spec.bundle import Bundle
from pipeline.spec.errors import ConfigError

from .conftest import Configure

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
    ("uri", "open_"), [("s3://a/b", True), ("https://a/b", True), ("pvc://a/b", False), ("oci://a/b@sha256:1", False)]
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
