from __future__ import annotations

import pytest

from serve.errors import MethodNotAllowed, NotFound
from serve.routes import PATHS, Route, find_route, needs_no_key


@pytest.mark.parametrize(
    ("path", "method", "route"),
    [
        ("/", "HEAD", ("root", "", "")),
        ("/v2", "GET", ("server", "", "")),
        ("/v2/", "GET", ("server", "", "")),
        ("/v2/health/ready", "GET", ("ready", "", "")),
        ("/v1/models/a.b-c_1", "GET", ("v1_model", "a.b-c_1", "")),
        ("/v1/models/a:predict", "POST", ("predict", "a", "")),
        ("/v1/models/a/versions/2:predict", "POST", ("predict", "a", "2")),
        ("/v2/models/a/infer", "POST", ("infer", "a", "")),
        ("/v2/models/a/versions/12/infer", "POST", ("infer", "a", "12")),
        ("/v2/models/a/versions/0123456789ab/ready", "HEAD", ("model_ready", "a", "0123456789ab")),
        ("/v2/models/versions", "GET", ("model", "versions", "")),
        ("/v2/repository/index", "POST", ("index", "", "")),
        ("/v2/models/stats", "GET", ("statistics", "", "")),
        ("/v2/models/a/stats", "GET", ("model_statistics", "a", "")),
        ("/v2/models/a/versions/1/stats", "GET", ("model_statistics", "a", "1")),
    ],
)
def test_path_is_parsed_into_route_model_and_version(path: str, method: str, route: tuple[str, str, str]) -> None:
    found = find_route(path, method)
    assert (found.kind, found.model, found.version) == route


@pytest.mark.parametrize(
    "path",
    [
        "",
        "/v3",
        "/v2//",
        "/v2/models/",
        "/v2/models/a/",
        "/v2/models/../infer",
        "/v2/models/-a/infer",
        "/v2/models/a b/infer",
        "/v2/models/a\n/infer",
        "/v2/models/a\u0660/versions/\u0661",
        "/v2/models/" + "a" * 129,
        "/v2/models/a/versions//infer",
        "/v2/models/a/versions/1/versions/2/infer",
        "/v2/models/a/versions/" + "1" * 65,
        "/V2/models/a",
        "/v1/models/a:predict/",
        "/v1/models/:predict",
        "//v2",
    ],
)
def test_malformed_path_is_unknown(path: str) -> None:
    with pytest.raises(NotFound, match=r"not found; /openapi\.json lists what there is"):
        find_route(path, "GET")


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("/v1/models/a:explain", "this service has no explainer; use :predict"),
        ("/v1/models/a/versions/1:explain", "this service has no explainer"),
        ("/v2/repository/models/a/load", "models are loaded by the operator"),
        ("/v2/repository/models/a/unload", "never by clients"),
        ("/v2/models/a/config", "models have no Triton configuration"),
        ("/v2/models/a/versions/1/config", "the same path without /config"),
        ("/v2/models/a/generate", "answer at /openai/v1/completions"),
        ("/v2/models/a/versions/1/generate_stream", "no generate endpoint"),
        ("/v2/trace/setting", "traces are set by the OTEL_ variables"),
        ("/v2/models/a/trace/setting", "traces are set by the OTEL_ variables"),
        ("/v2/logging", "logs are set by --log-format"),
        ("/v2/systemsharedmemory/status", "shares no memory with clients"),
        ("/v2/systemsharedmemory/region/a b/register", "send tensors as raw bytes"),
        ("/v2/cudasharedmemory/unregister", "shares no memory with clients"),
    ],
)
def test_unsupported_endpoint_is_refused_with_the_reason(path: str, reason: str) -> None:
    with pytest.raises(NotFound, match=reason):
        find_route(path, "POST")


@pytest.mark.parametrize("kind", PATHS)
def test_other_methods_are_refused_naming_the_allowed_ones(kind: str) -> None:
    path, methods = PATHS[kind]
    place = path.replace("{model_name}", "a")
    for method in ("GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "get"):
        if method in methods:
            assert isinstance(find_route(place, method), Route)
            continue
        with pytest.raises(MethodNotAllowed) as caught:
            find_route(place, method)
        assert caught.value.headers == ((b"allow", ", ".join(methods).encode()),)


def test_error_for_a_long_path_is_short() -> None:
    with pytest.raises(NotFound) as caught:
        find_route("/" + "x" * 10_000, "G" * 1000)
    assert len(str(caught.value)) < 300


def test_only_probes_need_no_key() -> None:
    named = {kind: path.replace("{model_name}", "a") for kind, (path, _) in PATHS.items()}
    found = {kind for kind, path in named.items() if any(needs_no_key(path, method) for method in ("GET", "POST"))}
    assert found == {"live", "ready"}
