"""A headless Chromium for tests, controlled over the DevTools protocol."""

from __future__ import annotations

import base64
import itertools
import json
import shutil
import subprocess
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from websockets.sync.client import connect

SECONDS = 20
PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_FLAGS = (
    "--headless",
    "--no-sandbox",  # of its own: it runs as root in containers, and sees our pages only
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--remote-debugging-port=0",
)

Point = tuple[float, float]


class Browser:
    """One page. `sent` has every URL that it loaded, `complaints` its script errors and policy violations."""

    def __init__(self, profile: Path) -> None:
        assert PROGRAM is not None
        argv = [PROGRAM, *_FLAGS, f"--user-data-dir={profile}", "about:blank"]
        self.requested_urls: list[str] = []
        self.complaints: list[str] = []
        self.signed_in, self._password = 0, ""
        self._numbers, self._session = itertools.count(1), ""
        with ExitStack() as stack:
            process = subprocess.Popen(argv, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True)
            stack.callback(_end, process)
            self._socket = stack.enter_context(connect(_address(process), max_size=None, proxy=None))
            self._begin()
            self.close = stack.pop_all().close

    def _begin(self) -> None:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Log", "Runtime"):
            self.call(f"{domain}.enable")

    def _say(self, method: str, **parameters: Any) -> int:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        self._socket.send(json.dumps(message | ({"sessionId": self._session} if self._session else {})))
        return number

    def call(self, method: str, **parameters: Any) -> Any:
        number = self._say(method, **parameters)
        while True:
            answer = json.loads(self._socket.recv(timeout=SECONDS))
            if answer.get("id") == number:
                assert "error" not in answer, answer["error"]
                return answer["result"]
            self._note(answer)

    def sign_in(self, password: str) -> None:
        """Answer the browser's password prompt; once, as the browser remembers it."""
        self._password = password
        self.call("Fetch.enable", handleAuthRequests=True)

    def _note(self, event: dict[str, Any]) -> None:
        received = event.get("params", {})
        if event.get("method") == "Fetch.requestPaused":
            self._say("Fetch.continueRequest", requestId=received["requestId"])
        elif event.get("method") == "Fetch.authRequired":
            typed = {"response": "ProvideCredentials", "username": "anyone", "password": self._password}
            self.signed_in += 1
            self._say("Fetch.continueWithAuth", requestId=received["requestId"], authChallengeResponse=typed)
        if event.get("method") == "Network.requestWillBeSent":
            self.requested_urls.append(received["request"]["url"])
        elif event.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(received["exceptionDetails"]))
        elif event.get("method") == "Log.entryAdded" and received["entry"]["source"] in ("security", "javascript"):
            self.complaints.append(received["entry"]["text"])

    def open(self, url: str, *, width: int = 1200, height: int = 1000, dark: bool = False) -> None:
        self.requested_urls.clear()
        self.complaints.clear()
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=url)
        self.wait(f"location.href.startsWith({json.dumps(url)}) && document.readyState === 'complete'")

    def value(self, script: str) -> Any:
        found = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, script: str) -> Any:
        """Return the value of the script as soon as it is true."""
        deadline = time.monotonic() + SECONDS
        while not (found := self.value(script)):
            assert time.monotonic() < deadline, f"never became true: {script}"
            time.sleep(0.02)
        return found

    def text(self, selector: str) -> str:
        """Return the text of the element once it exists."""
        return str(self.wait(f"document.querySelector({json.dumps(selector)})?.textContent"))

    def place(self, selector: str, points: Sequence[Point]) -> list[Point]:
        """Convert points given as fractions of an element to pixels of the window."""
        box = f"document.querySelector({json.dumps(selector)}).getBoundingClientRect()"
        left, top, width, height = self.value(f"(box => [box.left, box.top, box.width, box.height])({box})")
        return [(left + x * width, top + y * height) for x, y in points]

    def drag(self, points: Sequence[Point]) -> None:
        self._mouse("mousePressed", points[0])
        for point in points[1:]:
            self._mouse("mouseMoved", point)
        self._mouse("mouseReleased", points[-1])

    def swipe(self, points: Sequence[Point]) -> None:
        for kind, (x, y) in zip(("touchStart", *["touchMove"] * len(points)), points, strict=False):
            self.call("Input.dispatchTouchEvent", type=kind, touchPoints=[{"x": x, "y": y}])
        self.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])

    def click(self, selector: str) -> None:
        (point,) = self.place(selector, [(0.5, 0.5)])
        self.drag([point])

    def press(self, selector: str, key: str) -> None:
        self.value(f"document.querySelector({json.dumps(selector)}).focus()")
        text = {"Enter": "\r", " ": " "}[key]
        self.call(
            "Input.dispatchKeyEvent", type="keyDown", key=key, code=key, text=text, windowsVirtualKeyCode=ord(text)
        )
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, code=key, windowsVirtualKeyCode=ord(text))

    def picture(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]))

    def _mouse(self, kind: str, point: Point) -> None:
        x, y = point
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", buttons=1, clickCount=1)


def _address(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    for line in process.stderr:
        if "DevTools listening on" in line:
            return line.split()[-1]
    raise AssertionError("Chromium ended at its start")


def _end(process: subprocess.Popen[str]) -> None:
    process.terminate()
    process.wait(SECONDS)
    assert process.stderr is not None
    process.stderr.close()
