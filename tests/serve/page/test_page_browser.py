"""The page in a real browser."""

from __future__ import annotations

import base64
import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import pytest

from pipeline.evaluate.worst_samples import png

from ..browser import PROGRAM, Browser

if TYPE_CHECKING:
    from tests.serve.conftest import Launcher, Running


pytestmark = [pytest.mark.long, pytest.mark.skipif(PROGRAM is None, reason="no Chromium is installed here")]

OpenPage = Callable[..., "Running"]
SEVEN = [(0.3, 0.2), (0.5, 0.2), (0.7, 0.2), (0.6, 0.5), (0.45, 0.85)]
FIRST = "#answer .first dd"
EDIT_AS_JSON = ".buttons button:nth-child(3)"
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
    """The page of the digits bundle; checks after the test that nothing was loaded from elsewhere or refused."""
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


def _resealed(
    bundle: Path, seal: Callable[[Path], str], *, codec: str = ECHO, instances: list[Any], prediction: Any = None
) -> Path:
    """Replace codec and examples of a bundle, but not the golden tensors."""
    (bundle / "codec.py").write_text(codec)
    signature = json.loads((bundle / "signature.json").read_text())
    (bundle / "signature.json").write_text(json.dumps(signature | {"codec": "EchoCodec"}))
    golden = json.loads((bundle / "golden.json").read_text())
    predictions = [prediction or {"echo": one} for one in instances]
    (bundle / "golden.json").write_text(json.dumps(golden | {"instances": instances, "predictions": predictions}))
    (bundle / "card.md").write_text(f"# {ATTACK}\n\n- {ATTACK}\n\n[{ATTACK}](https://x)\n")
    seal(bundle)
    return bundle


@pytest.fixture
def open_page(browser: Browser, own_bundle: Path, seal: Callable[[Path], str], start: Launcher) -> OpenPage:
    """Return a function that opens the page of a changed bundle, and returns the service."""

    def open_it(**changes: Any) -> Running:
        server = start(_resealed(own_bundle, seal, **changes))
        browser.open(f"{server.url}/")
        return server

    return open_it


def test_text_never_becomes_markup(browser: Browser, open_page: OpenPage) -> None:
    example = {"name": f"</script>{ATTACK}", "lines": "\u2028<!--"}
    open_page(instances=[example])
    assert browser.value("document.getElementById('field-0').value") == example["name"]
    browser.click("button.main")
    assert ATTACK in browser.text("#answer pre")
    browser.click(EDIT_AS_JSON)
    assert json.loads(browser.value("document.getElementById('body').value")) == {"instances": [example]}
    browser.value(f"document.getElementById('body').value = JSON.stringify({{instances: [{json.dumps(ATTACK)}]}})")
    browser.click("button.main")
    browser.wait(f"document.querySelector('#answer dd')?.textContent === {json.dumps(ATTACK)}")
    assert browser.value("window.harmed === undefined && document.images.length === 0")
    assert browser.complaints == []


def _set(browser: Browser, field: int, value: str) -> None:
    browser.value(f"document.getElementById('field-{field}').value = {json.dumps(value)}")


def test_row_of_a_table_has_a_field_for_each_column(browser: Browser, open_page: OpenPage) -> None:
    first = {"rooms": 3, "area": 81.5, "city": "Bern", "garden": True, "built": None, "tags": ["a"], "note": "x" * 80}
    server = open_page(instances=[first, {**first, "rooms": 4, "built": 1950}])
    kinds = "[...document.querySelectorAll('.fields > div')].map(one => one.className)"
    assert browser.value(kinds) == ["number", "number", "text", "boolean", "number", "json", "lines"]
    names = browser.value("[...document.querySelectorAll('.fields label')].map(one => one.textContent)")
    assert names == list(first)
    assert _sent(browser) == {"instances": [first]}
    for field, value in enumerate(["7", "", "Genève's", "false", "1999", '{"b": 1}', ""]):
        _set(browser, field, value)
    browser.click("button.main")
    sent = {"rooms": 7, "area": None, "city": "Genève's", "garden": False, "built": 1999, "tags": {"b": 1}, "note": ""}
    assert json.loads(browser.text("#answer pre")) == {"predictions": [{"echo": sent}]}
    browser.click(".buttons button:nth-child(2)")
    assert browser.value("document.getElementById('field-0').value") == "4", "the next example"
    _set(browser, 5, "{")
    browser.click("button.main")
    assert browser.text("#answer .error") == "tags: not valid JSON"
    browser.open(f"{server.url}/", width=390, dark=True)
    assert browser.value("document.documentElement.scrollWidth") <= 390
    assert browser.complaints == []


def test_text_is_typed_into_one_field(browser: Browser, open_page: OpenPage) -> None:
    open_page(instances=["a short text"])
    assert browser.value("document.querySelector('textarea#field-0').value") == "a short text"
    _set(browser, 0, "x" * 3000)
    browser.click("button.main")
    browser.wait("document.querySelector('#answer pre')?.textContent.includes('xxx')")
    assert " -d @request.json http" in browser.text("#form details pre"), "a long body is in a file"
    _set(browser, 0, "two\nlines")
    browser.click("button.main")
    browser.wait("document.querySelector('#answer pre').textContent.includes('two')")
    assert json.loads(browser.text("#answer pre")) == {"predictions": [{"echo": "two\nlines"}]}


PNG = base64.b64encode(png(np.linspace(0, 255, 64 * 48).reshape(48, 64, 1).astype(np.uint8))).decode()


def test_picture_is_dropped_and_answered_by_a_picture_beside_it(browser: Browser, open_page: OpenPage) -> None:
    open_page(instances=[{"b64": PNG}])
    pictures = "[...document.querySelectorAll('{} img')].map(one => [one.naturalWidth, one.naturalHeight])"
    browser.wait(f"{pictures.format('.fields')}.join() === '64,48'")
    other = base64.b64encode(png(np.zeros((20, 30, 3), np.uint8))).decode()
    browser.value(
        f"(async () => {{ const file = new File([Uint8Array.from(atob('{other}'), one => one.charCodeAt(0))], 'a.png', "
        "{type: 'image/png'}); const dataTransfer = new DataTransfer(); dataTransfer.items.add(file); "
        "document.querySelector('.fields .picture').dispatchEvent(new DragEvent('drop', {dataTransfer})); })()"
    )
    browser.wait(f"{pictures.format('.fields')}.join() === '30,20'")
    browser.click("button.main")
    browser.wait(f"{pictures.format('#answer')}.join() === '30,20,30,20'")
    captions = browser.value("[...document.querySelectorAll('#answer figcaption')].map(one => one.textContent)")
    assert captions == ["sent", "echo"]
    assert json.loads(browser.text("#answer pre")) == {"predictions": [{"echo": {"b64": other}}]}
    assert browser.complaints == []


FOUND = {
    "found": [{"box": [8, 8, 40, 30], "label": "car", "score": 0.9}],
    "mask": np.eye(8).tolist(),
    "best": ["a", "b"],
}
FINDER = f"""
import numpy as np

class EchoCodec:
    def decode(self, instances):
        return {{"image": np.zeros((len(instances), 1, 8, 8), np.float32)}}

    def encode(self, outputs):
        return [{FOUND} for _ in outputs["logits"]]
"""


def test_boxes_are_drawn_on_the_picture_that_was_sent(browser: Browser, open_page: OpenPage) -> None:
    open_page(codec=FINDER, instances=[{"image": PNG, "threshold": 0.5}], prediction=FOUND)
    browser.click("button.main")
    browser.wait("document.querySelector('canvas.boxes')?.width === 640")
    edge = "[...document.querySelector('canvas.boxes').getContext('2d').getImageData(80, 200, 1, 1).data]"
    red, green, blue, _ = browser.value(edge)
    assert blue > red + 50 < green + 100, "the left side of the box has a colour, the picture is grey"
    assert browser.value("document.querySelectorAll('#answer .pictures canvas').length") == 2, "and the mask"
    table = browser.value("[...document.querySelectorAll('#answer td')].map(one => one.textContent)")
    assert table == ["[8,8,40,30]", "car", "0.9"]
    assert browser.text("#answer dd") == "a, b"
    assert browser.complaints == []


def test_tensor_form_and_its_errors(browser: Browser, open_page: OpenPage) -> None:
    server = open_page(instances=[])
    body = json.loads(browser.value("document.getElementById('body').value"))
    assert [(one["name"], one["shape"]) for one in body["inputs"]] == [("image", [1, 1, 8, 8])]
    browser.click("button.main")
    assert browser.text("#answer .bars b") == "0"
    answer = httpx.post(f"{server.url}/v2/models/tiny/infer", json=body, timeout=60).json()
    assert json.loads(browser.text("#answer pre"))["outputs"] == answer["outputs"]
    browser.value("document.getElementById('body').value = '{'")
    browser.click("button.main")
    assert browser.text("#answer .error").startswith("400: body: not valid JSON")
