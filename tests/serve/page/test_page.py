from __future__ import annotations

import base64
import hashlib
import re
from concurrent.futures import Executor
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import httpx
import numpy as np
import pytest

from pipeline.contract.bundle import Bundle
from pipeline.contract.golden import Golden
from serve.model_version import Canary, ModelVersion
from serve.page import page
from serve.page.page import form_fields, inline, render_markdown
from serve.runtime.predictor import Predictor
from serve.runtime.session import Session
from serve.shadow import Agreement

if TYPE_CHECKING:
    from tests.serve.conftest import Launcher, Running


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("# a", "<h2>a</h2>"),
        ("### a", "<h4>a</h4>"),
        ("a\nb\n\nc", "<p>a b</p><p>c</p>"),
        ("- a\n- b", "<ul><li>a</li><li>b</li></ul>"),
        ("```\n# a\n  b\n```\nc", "<pre><code># a\n  b</code></pre><p>c</p>"),
        ("```\nnever closed", "<pre><code>never closed</code></pre>"),
        ("", ""),
    ],
)
def test_markdown_blocks_become_html(text: str, html: str) -> None:
    assert render_markdown(text) == html


def test_table_has_head_and_rows() -> None:
    html = render_markdown("| a | b |\n|---|:-:|\n| `1` | **2** |")
    assert '<th scope="col">a</th><th scope="col">b</th>' in html
    assert '<th scope="row"><code>1</code></th><td><strong>2</strong></td>' in html
    assert "---" not in html


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("**a** *b* `c`", "<strong>a</strong> <em>b</em> <code>c</code>"),
        ("2 * 3 * 4", "2 * 3 * 4"),
        ("[a](https://x.y/z)", '<a href="https://x.y/z" rel="noopener noreferrer">a</a>'),
        ("[a](javascript:alert(1))", "[a](javascript:alert(1))"),
        ("[a](//x.y)", "[a](//x.y)"),
        ('[a](https://x"onclick="y)', '<a href="https://x&quot;onclick=&quot;y" rel="noopener noreferrer">a</a>'),
        ("<b>`<i>`**<u>**", "&lt;b&gt;<code>&lt;i&gt;</code><strong>&lt;u&gt;</strong>"),
    ],
)
def test_other_text_is_escaped(text: str, html: str) -> None:
    assert inline(text) == html


HTML = {"accept": "text/html,application/xhtml+xml"}
STYLE = (Path(page.__file__).parent / "page.css").read_text()


@pytest.fixture
def served(bundle: Bundle) -> ModelVersion:
    return ModelVersion("tiny", "1", Predictor(bundle, Session(bundle, "cpu", 1)), None)  # type: ignore[arg-type]  # never runs


def _get(server: Running, path: str = "/", **headers: str) -> httpx.Response:
    return httpx.get(f"{server.url}{path}", headers=headers, timeout=60)


def test_browsers_get_the_page_and_probes_a_status(server: Running) -> None:
    page = _get(server, **HTML)
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.text.startswith("<!doctype html>\n<html lang=")
    assert _get(server, accept="*/*").json() == {"status": "alive"}
    assert {_get(server).headers["vary"], page.headers["vary"]} == {"accept"}


def test_content_security_policy_allows_only_own_script_and_style(server: Running) -> None:
    page = _get(server, **HTML)
    policy = dict(part.split(" ", 1) for part in page.headers["content-security-policy"].split("; "))
    assert (policy["default-src"], policy["connect-src"], policy["frame-ancestors"]) == ("'none'", "'self'", "'none'")
    (script,) = re.findall(r"<script>(.*?)</script>", page.text, re.DOTALL)
    (style,) = re.findall(r"<style>(.*?)</style>", page.text, re.DOTALL)
    for kind, text in (("script-src", script), ("style-src", style)):
        assert policy[kind] == f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
    assert not re.search(r"\son[a-z]+=|\sstyle=|javascript:", page.text.partition("<body>")[2].partition("<script>")[0])
    assert re.findall(r"(?:src|href)=.(?!/|data:)", page.text.partition("<script>")[0]) == []


def test_page_shows_the_model(server: Running, bundle: Bundle) -> None:
    text = _get(server, **HTML).text
    for text_part in (
        "<h1>tiny</h1>",
        bundle.digest[:12],
        "verdict: pass",
        "runs on CPU",
        "batch × 1 × 8 × 8",
        "logits",
    ):
        assert text_part in text
    assert "<h3>tiny</h3>" in text, "the card"


def test_unknown_model_is_not_found(server: Running) -> None:
    assert _get(server, "/?model=tiny", **HTML).status_code == 200
    assert _get(server, "/?model=other", **HTML).status_code == 404


def test_counters_are_reported_per_version(server: Running, bundle: Bundle) -> None:
    def counters() -> dict[str, object]:
        answer = _get(server, "/page.json")
        assert answer.headers["cache-control"] == "no-store"
        assert answer.json()["ready"] is True
        (version,) = answer.json()["models"]
        return dict(version)

    before = counters()
    assert (before["model"], before["version"], before["current"]) == ("tiny", "1", True)
    assert before["digest"] == bundle.digest
    httpx.post(f"{server.url}/v1/models/tiny:predict", json={"instances": bundle.golden().instances}, timeout=60)
    httpx.post(f"{server.url}/v1/models/tiny:predict", json={}, timeout=60)
    after = counters()
    grown = {key: after[key] - before[key] for key in ("requests", "failed", "batches", "rows")}  # type: ignore[operator]
    assert grown == {"requests": 2, "failed": 1, "batches": 1, "rows": 2}


def test_page_can_be_turned_off(bundle_path: Path, start: Launcher) -> None:
    server = start(bundle_path, options=["--no-page"])
    assert _get(server, **HTML).json() == {"status": "alive"}
    refused = _get(server, "/page.json")
    assert refused.status_code == 404
    assert "the page is off" in refused.json()["error"]


def test_canary_and_shadow_are_shown(served: ModelVersion, pool: Executor) -> None:
    candidate = ModelVersion("tiny", "2", served.predictor, pool)
    served.canary = Canary(candidate, 0.1)
    served.shadow = SimpleNamespace(digest="d" * 64, share=0.5, agreement=Agreement(same=1200, other=3))  # type: ignore[assignment]
    html = page.render(page.PageModel(served, [served, candidate], ["another"], ready=False)).decode()
    for part in (
        "answers the other requests",
        "canary: gets 10% of the requests",
        "shadow: gets copies of 50% of the requests; 1,200 equal answers, 3 different",
        '<a href="/?model=another">another</a>',
        "not ready",
    ):
        assert part in html


def test_codec_with_drawing_gets_a_drawing_form(served: ModelVersion, bundle: Bundle) -> None:
    form = page.form(served)
    assert (form["kind"], form["examples"]) == ("drawing", bundle.golden().instances)
    assert form["drawing"] == {"width": 8, "height": 8, "top": 16, "fit": True, "pen": 1.5}


def test_codec_without_drawing_gets_an_instance_form(served: ModelVersion, bundle: Bundle) -> None:
    served.predictor.drawing = None
    assert page.form(served) == {"kind": "instances", "examples": bundle.golden().instances}


PNG, JPEG = "iVBORw0KGgoAAAAN", "/9j/4AAQSkZJRg=="


@pytest.mark.parametrize(
    ("instance", "kinds"),
    [
        ({"a": 1, "b": 2.5, "c": "x", "d": False}, ["number", "number", "text", "boolean"]),
        ({"a": "x" * 61, "b": "two\nlines", "c": [1], "d": {"e": 1}}, ["lines", "lines", "json", "json"]),
        ({"picture": PNG, "other": {"b64": JPEG}, "none": None}, ["picture", "picture", "json"]),
        ("a text", ["lines"]),
        (PNG, ["picture"]),
        ({"b64": PNG}, ["picture"]),
        (3.5, ["number"]),
    ],
)
def test_fields_of_the_form_follow_from_the_example(instance: object, kinds: list[str]) -> None:
    form = form_fields([instance])
    assert form is not None
    assert [field["kind"] for field in form["fields"]] == kinds
    assert form["bare"] == (not isinstance(instance, dict) or "b64" in instance)


@pytest.mark.parametrize("instance", [[1, 2], [[0, 1]], None, {}, {"a": [1]}, {str(i): i for i in range(101)}])
def test_other_instances_are_edited_as_json(instance: object) -> None:
    assert form_fields([instance]) is None


def test_later_examples_complete_the_type_of_a_field() -> None:
    form = form_fields([{"a": None, "b": "x", "c": 1}, {"a": 2, "b": "y" * 99, "c": "1"}, {"a": 3, "c": 1}])
    assert form is not None
    fields = {field["name"]: (field["kind"], field["nullable"]) for field in form["fields"]}
    assert fields == {"a": ("number", True), "b": ("lines", True), "c": ("json", False)}


def test_form_of_a_picture_needs_no_example_in_the_page(
    served: ModelVersion, monkeypatch: pytest.MonkeyPatch, bundle: Bundle
) -> None:
    served.predictor.drawing = None
    known = bundle.golden()
    golden = Golden(known.inputs, known.outputs, [PNG + "A" * (300 << 10)], [], known.rtol, known.atol)
    monkeypatch.setattr(Bundle, "golden", lambda self: golden)
    form = page.form(served)
    assert (form["kind"], form["bare"], form["examples"]) == ("fields", True, [])


@pytest.fixture
def golden(monkeypatch: pytest.MonkeyPatch, bundle: Bundle) -> Golden:
    """Replace the bundle's golden requests by ones without instances."""
    known = bundle.golden()
    golden = Golden(known.inputs, known.outputs, [], [], known.rtol, known.atol)
    monkeypatch.setattr(Bundle, "golden", lambda self: golden)
    return golden


def test_without_instances_the_form_has_golden_tensors(served: ModelVersion, golden: Golden) -> None:
    served.predictor.drawing = None
    form = page.form(served)
    assert form["inputs"] == [{"name": "image", "datatype": "FP32", "shape": ("batch", 1, 8, 8)}]
    (body,) = form["examples"]
    (tensor,) = body["inputs"]
    np.testing.assert_array_equal(np.array(tensor["data"], np.float32), golden.inputs["image"][0].ravel())


def test_large_tensors_are_not_embedded(served: ModelVersion, golden: Golden, monkeypatch: pytest.MonkeyPatch) -> None:
    served.predictor.drawing = None
    monkeypatch.setattr(page, "_MAX_EXAMPLE_BYTES", 100)
    assert page.form(served)["examples"] == []


def test_page_works_without_the_bundle_folder(
    served: ModelVersion, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Bundle, "golden", lambda self: (self.path / "gone").read_text())
    assert page.form(served)["examples"] == []
    assert "the page shows no example" in caplog.text


def test_embedded_data_cannot_close_its_element(served: ModelVersion, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "form", lambda _: {"examples": ["</script><script>&<!--"]})
    assert not set("<>&") & set(page.embedded(served))


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(
    ("above", "below"),
    [
        *[("text", one) for one in ("page", "card", "faint")],
        *[("muted", one) for one in ("page", "card", "faint")],
        *[(one, f"{one}-soft") for one in ("good", "bad", "warn")],
        ("one", "card"),
        ("card", "one"),
    ],
)
def test_text_contrast_meets_accessibility_guidelines(scheme: str, above: str, below: str) -> None:
    light, dark = re.findall(r":root \{(.*?)\}", STYLE, re.DOTALL)
    colors = dict(re.findall(r"--([a-z-]+): #([0-9a-f]+)", dark if scheme == "dark" else light))
    lighter, darker = sorted((_luminance(colors[above]), _luminance(colors[below])), reverse=True)
    assert (lighter + 0.05) / (darker + 0.05) >= 4.5


def _luminance(color: str) -> float:
    """Return the relative luminance of the WCAG."""
    whole = color if len(color) == 6 else "".join(2 * one for one in color)
    parts = [int(whole[place : place + 2], 16) / 255 for place in (0, 2, 4)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return float(np.dot(linear, [0.2126, 0.7152, 0.0722]))
