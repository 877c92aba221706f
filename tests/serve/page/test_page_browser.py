"""The page in a real browser."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from ..browser import PROGRAM, Browser

if TYPE_CHECKING:
    from tests.serve.conftest import Launcher, Running


pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no Chromium is installed here")

SEVEN = [(0.3, 0.2), (0.5, 0.2), (0.7, 0.2), (0.6, 0.5), (0.45, 0.85)]
FIRST = "#answer .first dd"
ATTACK = "<img src=x onerror='window.harmed=1'><script>window.harmed=1</script>"

# A codec that echoes the instances without validation.
ECHO = """
import numpy as np

class EchoCodec:
    def decode(self, instances):
        self.instances = instances
        return {"image": np.zeros((len(instances), 1, 8, 8), np.float32)}

    def encode(self, outputs):
        return [{"echo": one} for one in self.instances]
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with contextlib.closing(Browser(tmp_path_factory.mktemp("chromium"))) as browser:
        yield browser


@pytest.fixture
def page(browser: Browser, server: Running) -> Iterator[Browser]:
    """The page of the digits bundle. No test may load anything from elsewhere or violate the policy."""
    browser.open(f"{server.url}/")
    yield browser
    assert [url for url in browser.requested_urls if not url.startswith((f"{server.url}/", "data:"))] == []
    assert browser.complaints == []


def _sent(page: Browser) -> Any:
    """Return the body that was sent, from the command line shown on the page."""
    command: str = page.value("document.querySelector('#form details pre').textContent")
    return json.loads(command.split("'")[1])


def _digit(server: Running, body: Any) -> str:
    answer = httpx.post(f"{server.url}/v1/models/tiny:predict", json=body, timeout=60).json()
    return str(answer["predictions"][0]["digit"])


@pytest.mark.parametrize("way", ["drag", "swipe"])
def test_drawn_digit_is_sent_as_a_picture(page: Browser, server: Running, way: str) -> None:
    getattr(page, way)(page.place("canvas.pad", SEVEN))
    shown = page.text(FIRST)
    (picture,) = _sent(page)["instances"]
    assert (len(picture), {len(row) for row in picture}) == (8, {8})
    assert sum(map(sum, picture)) > 100
    assert any(grey > 8 for grey in picture[0]), "what is drawn fills the picture"
    assert any(grey > 8 for grey in picture[7])
    assert all(0 <= grey <= 16 for row in picture for grey in row)
    assert shown == _digit(server, {"instances": [picture]})
    assert "ms round trip" in page.text(".took")


def test_clear_removes_drawing_and_answer(page: Browser) -> None:
    page.drag(page.place("canvas.pad", SEVEN))
    page.text(FIRST)
    page.click(".buttons button:first-child")
    ink = "canvas => canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data.some(one => one > 0)"
    assert page.value("document.getElementById('answer').childElementCount") == 0
    assert not page.value(f"[...document.querySelectorAll('canvas')].some({ink})")


def test_example_is_sent_by_keyboard(page: Browser, server: Running, picture: list[Any]) -> None:
    page.press(".buttons button:nth-child(2)", "Enter")
    assert page.text(FIRST) == _digit(server, {"instances": [picture]})
    assert _sent(page) == {"instances": [picture]}
    assert page.value("document.querySelectorAll('#answer .bars b').length") == 10


def test_live_counters_follow_requests(page: Browser, server: Running, picture: list[Any]) -> None:
    page.wait("document.getElementById('live-waiting').textContent === '0'")
    for _ in range(3):
        _digit(server, {"instances": [picture, picture]})
    page.wait("document.getElementById('live-p50').textContent.endsWith('ms')")
    assert page.value("Number(document.getElementById('live-rate').textContent)") > 0
    assert page.text("#live-batch") == "2"
    assert page.text("#state") == "ready"


@pytest.mark.parametrize(("width", "dark"), [(320, False), (390, True), (800, False)])
def test_nothing_is_wider_than_the_window(page: Browser, server: Running, width: int, dark: bool) -> None:
    page.open(f"{server.url}/", width=width, dark=dark)
    page.press(".buttons button:nth-child(2)", "Enter")
    page.text(FIRST)
    assert page.value("document.documentElement.scrollWidth") <= width


def test_controls_and_pictures_have_accessible_names(page: Browser) -> None:
    page.press(".buttons button:nth-child(2)", "Enter")
    page.text(FIRST)
    tree = page.call("Accessibility.getFullAXTree")["nodes"]
    named = {"button", "image", "textbox", "link", "combobox", "heading"}
    nameless = [
        node["role"]["value"]
        for node in tree
        if not node["ignored"] and node["role"]["value"] in named and not node.get("name", {}).get("value", "").strip()
    ]
    assert nameless == []
    assert {"heading", "button", "image", "link"} <= {node["role"]["value"] for node in tree if not node["ignored"]}


def test_page_works_with_an_api_key(browser: Browser, bundle_path: Path, start: Launcher, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("an-unguessable-key\n")
    server = start(bundle_path, options=["--api-keys", str(tmp_path / "keys")])
    browser.sign_in("an-unguessable-key")
    try:
        browser.open(f"{server.url}/")
        browser.press(".buttons button:nth-child(2)", "Enter")
        assert browser.text(FIRST).isdigit()
        browser.wait("document.getElementById('live-waiting').textContent === '0'")
    finally:
        browser.call("Fetch.disable")
    assert browser.signed_in == 1


def _resealed(bundle: Path, seal: Callable[[Path], str], *, codec: str = ECHO, instances: list[Any]) -> Path:
    """Replace codec and examples of a bundle, but not the golden tensors."""
    (bundle / "codec.py").write_text(codec)
    signature = json.loads((bundle / "signature.json").read_text())
    (bundle / "signature.json").write_text(json.dumps(signature | {"codec": "EchoCodec"}))
    golden = json.loads((bundle / "golden.json").read_text())
    predictions = [{"echo": one} for one in instances]
    (bundle / "golden.json").write_text(json.dumps(golden | {"instances": instances, "predictions": predictions}))
    (bundle / "card.md").write_text(f"# {ATTACK}\n\n- {ATTACK}\n\n[{ATTACK}](https://x)\n")
    seal(bundle)
    return bundle


def test_text_never_becomes_markup(
    browser: Browser, own_bundle: Path, seal: Callable[[Path], str], start: Launcher
) -> None:
    example = {"name": f"</script>{ATTACK}", "lines": "\u2028<!--"}
    server = start(_resealed(own_bundle, seal, instances=[example]))
    browser.open(f"{server.url}/")
    assert json.loads(browser.value("document.getElementById('body').value")) == {"instances": [example]}
    browser.click("button.main")
    assert ATTACK in browser.text("#answer pre")
    browser.value(f"document.getElementById('body').value = JSON.stringify({{instances: [{json.dumps(ATTACK)}]}})")
    browser.click("button.main")
    browser.wait(f"document.querySelector('{FIRST}')?.textContent === {json.dumps(ATTACK)}")
    assert browser.value("window.harmed === undefined && document.images.length === 0")
    assert browser.complaints == []


def test_tensor_form_and_its_errors(
    browser: Browser, own_bundle: Path, seal: Callable[[Path], str], start: Launcher
) -> None:
    server = start(_resealed(own_bundle, seal, instances=[]))
    browser.open(f"{server.url}/")
    body = json.loads(browser.value("document.getElementById('body').value"))
    assert [(one["name"], one["shape"]) for one in body["inputs"]] == [("image", [1, 1, 8, 8])]
    browser.click("button.main")
    assert browser.text("#answer .bars b") == "0"
    answer = httpx.post(f"{server.url}/v2/models/tiny/infer", json=body, timeout=60).json()
    assert json.loads(browser.text("#answer pre"))["outputs"] == answer["outputs"]
    browser.value("document.getElementById('body').value = '{'")
    browser.click("button.main")
    assert browser.text("#answer .error").startswith("400: body: not valid JSON")
