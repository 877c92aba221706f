"""The page docs/kubernetes.md, from `pipe init` to a promoted canary, as a reader follows it."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from pipeline.system.sources import SOURCE_ROOT
from tests.ports import free_port

from .place import Place

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.usefixtures("nodes")]

BLOCK = re.compile(r"^```(sh|yaml|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_a_reader_reaches_the_canary_promotes_it_and_rolls_back(place: Place, tmp_path: Path) -> None:
    load = os.environ.get("PIPE_TEST_LOAD", "")
    if not load:
        pytest.skip("needs PIPE_TEST_LOAD, a command that loads an image's archive into the nodes, and podman")
    text = (SOURCE_ROOT / "docs" / "kubernetes.md").read_text().partition("\n## ")[0]
    reader = Reader(place, tmp_path, load)
    try:
        for language, body in BLOCK.findall(text):
            reader.follow(language, body)
    finally:
        reader.close()
    assert reader.answer["predictions"]
    status = json.loads(reader.pipe(["status", "-o", "json"]))["clusters"][0]
    assert (status["current"]["number"], status["canary"], status["drift"]) == (1, None, [])


@dataclass
class Reader:
    """Does what the page describes, in the folder where its commands are."""

    place: Place
    folder: Path
    load: str
    port: int = field(default_factory=free_port)
    answer: dict[str, object] = field(default_factory=dict)
    forward: subprocess.Popen[bytes] | None = None

    def follow(self, language: str, body: str) -> None:
        if language == "yaml":
            settings = body.replace("deploy:\n", f"deploy:\n  namespace: {self.place.namespace}\n")
            (self.folder / "pipe.yaml").write_text((self.folder / "pipe.yaml").read_text() + settings)
            return
        actions = {"cd": self.enter, "pipe": self.pipe, "kind": self.load_image, "kubectl": self.port_forward}
        for line in body.splitlines():
            command, *words = shlex.split(line)
            actions.get(command, self.send)(words)

    def enter(self, words: list[str]) -> None:
        self.folder /= words[0]

    def pipe(self, words: list[str]) -> str:
        command = [sys.executable, "-m", "pipeline", *words]
        done = subprocess.run(command, cwd=self.folder, capture_output=True, text=True)
        print(done.stderr)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    def load_image(self, words: list[str]) -> None:
        """Load the newest image, whose tag the page cannot know."""
        if words[0] != "load":
            return
        newest = max((self.folder / "runs").glob("*/package/image.json"), key=lambda path: path.parts[-3])
        image = json.loads(newest.read_text())["image"]
        assert image.partition(":")[0] == words[-1].partition(":")[0]
        archive = self.folder.parent / "image.tar"
        archive.unlink(missing_ok=True)
        subprocess.run(["podman", "save", "--output", archive, image], check=True)
        subprocess.run([*shlex.split(self.load), archive], check=True)

    def port_forward(self, words: list[str]) -> None:
        command = ["kubectl", "--namespace", self.place.namespace, *words[:-1], f"{self.port}:8080"]
        self.forward = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert self.forward.stdout is not None
        assert b"Forwarding" in self.forward.stdout.readline()

    def send(self, words: list[str]) -> None:
        """Send the documented request through the forwarded port."""
        url = f"http://{words[1].replace(':8080', f':{self.port}')}"
        request = urllib.request.Request(url, words[-1].encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=30) as response:
            self.answer = json.load(response)

    def close(self) -> None:
        if self.forward is not None:
            self.forward.terminate()
            self.forward.communicate(timeout=30)
