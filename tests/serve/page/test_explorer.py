"""The API explorer at `/docs`: its head, and the page in a real browser."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import jsonschema
import pytest

from ..browser import PROGRAM, Browser

if TYPE_CHECKING:
    from tests.serve.conftest import Launcher, Running

in_browser = pytest.mark.skipif(PROGRAM is None, reason="no Chromium is installed here")
KEY = "a-key-that-is-hard-to-guess"
OPEN = ".operation[open]"


def test_policy_allows_only_its_own_script_and_styles(server: Running) -> None:
    page = httpx.get(f"{server.url}/docs", timeout=60)
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(part.split(" ", 1) for part in page.headers["content-security-policy"].split("; "))
    assert (policy["default-src"], policy["connect-src"]) == ("'none'", "'self'")
    for tag in ("script", "style"):
        texts = re.findall(rf"<{tag}>(.*?)</{tag}>", page.text, re.DOTALL)
        hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts]
        assert policy[f"{tag}-src"] == " ".join(f"'sha256-{one}'" for one in hashes)
    assert re.findall(r"(?:src|href)=.(?!/|data:)", page.text.partition("<script>")[0]) == []


def test_setting_of_the_page_turns_it_off(start: Launcher, bundle_path: Path) -> None:
    answer = httpx.get(f"{start(bundle_path, options=['--no-page']).url}/docs", timeout=60)
    assert answer.status_code == 404
    assert "the page is off (serve.page: false)" in answer.json()["error"]


def test_examples_of_the_document_are_valid_requests(server: Running) -> None:
    document = httpx.get(f"{server.url}/openapi.json", timeout=60).json()
    for path in ("/v1/models/tiny:predict", "/v2/models/tiny/infer"):
        content = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        jsonschema.validate(content["example"], {**content["schema"], "components": document["components"]})
        assert httpx.post(server.url + path, json=content["example"], timeout=60).status_code == 200


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with contextlib.closing(Browser(tmp_path_factory.mktemp("chromium"))) as browser:
        yield browser


@contextlib.contextmanager
def explorer(browser: Browser, url: str) -> Iterator[Browser]:
    """The page, which may load nothing from elsewhere nor violate its policy."""
    browser.open(f"{url}/docs")
    browser.wait("document.querySelectorAll('.operation').length > 10")
    yield browser
    assert [one for one in browser.requested_urls if not one.startswith((f"{url}/", "data:"))] == []
    assert browser.complaints == []


def _open(page: Browser, path: str) -> None:
    operations = "[...document.querySelectorAll('.operation')]"
    page.value(f"{operations}.find((one) => one.querySelector('code').textContent === {json.dumps(path)}).open = true")
    page.wait(f"document.querySelector('{OPEN} button') !== null")


def _send(page: Browser) -> Any:
    """Send the request of the open operation, and return the text of the status and of the answer."""
    page.value(f"document.querySelector('{OPEN} .response').replaceChildren()")
    page.value(f"document.querySelector('{OPEN} button').click()")
    return page.text(f"{OPEN} .status .pill"), page.text(f"{OPEN} .response pre")


@pytest.mark.long
@in_browser
def test_example_is_sent_and_its_answer_shown(browser: Browser, server: Running) -> None:
    with explorer(browser, server.url) as page:
        _open(page, "/v1/models/tiny:predict")
        status, answer = _send(page)
        assert status == "200 OK"
        example = json.loads(page.value(f"document.querySelector('{OPEN} textarea').value"))
        same = httpx.post(f"{server.url}/v1/models/tiny:predict", json=example, timeout=60)
        assert json.loads(answer)["predictions"][0]["digit"] == same.json()["predictions"][0]["digit"]
        page.value(f"document.querySelector('{OPEN} textarea').value = '{{}}'")
        status, answer = _send(page)
        assert (status, json.loads(answer)) == (
            "400 Bad Request",
            {"error": 'body: the field "instances" is missing'},
        )


@pytest.mark.long
@in_browser
def test_operations_are_filtered_and_versions_hidden(browser: Browser, server: Running) -> None:
    visible = "[...document.querySelectorAll('.operation:not([hidden]) code')].map((one) => one.textContent)"
    with explorer(browser, server.url) as page:
        assert not any("/versions/" in path for path in page.value(visible))
        page.value("(f => { f.value = 'READINESS'; f.oninput(); })(document.getElementById('filter'))")
        assert page.value(visible) == ["/v1/models/tiny", "/v2/health/ready", "/v2/models/tiny/ready"]
        page.value("document.getElementById('versions').click()")
        assert "/v2/models/tiny/versions/1/ready" in page.value(visible)


@pytest.mark.long
@in_browser
def test_key_is_requested_where_one_is_needed(
    browser: Browser, start: Launcher, bundle_path: Path, tmp_path: Path
) -> None:
    (tmp_path / "keys").write_text(f"{KEY}\n")
    server = start(bundle_path, options=["--api-keys", str(tmp_path / "keys")])
    browser.sign_in(KEY)
    with explorer(browser, server.url) as page:
        assert page.value("document.getElementById('key').hidden") is False
        page.value("document.getElementById('key').value = 'another-key-that-is-wrong'")
        _open(page, "/v2")
        status, answer = _send(page)
        assert (status, json.loads(answer)["error"]) == ("401 Unauthorized", "the API key is not known here")
        page.value(f"document.getElementById('key').value = '{KEY}'")
        assert _send(page)[0] == "200 OK"
