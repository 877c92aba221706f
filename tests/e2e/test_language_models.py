"""Each recipe of `docs/language-models.md`, run as written, ends in a service with the documented answers."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from pipeline.system.sources import SOURCE_ROOT
from tests.ports import free_port

from .project_folder import PIPE, environment

_SECTIONS = re.split(r"^## ", (SOURCE_ROOT / "docs" / "language-models.md").read_text(), flags=re.MULTILINE)
RECIPES = {
    section.partition("\n")[0]: blocks[1]
    for section in _SECTIONS
    if (blocks := re.search(r"^```sh\n(.*?)^```$", section, re.MULTILINE | re.DOTALL))
}
ANSWERS = {
    section.partition("\n")[0]: blocks[1].strip()
    for section in _SECTIONS
    if (blocks := re.search(r"^```text\n(.*?)^```$", section, re.MULTILINE | re.DOTALL))
}


def test_the_document_has_its_recipes() -> None:
    assert [name.partition(" ")[0] for name in RECIPES] == ["Supervised", "Direct", "LoRA", "From"]
    assert RECIPES.keys() == ANSWERS.keys()


@pytest.mark.long
@pytest.mark.parametrize("name", RECIPES)
def test_recipe_works_as_documented(name: str, tmp_path: Path) -> None:
    port, printed = free_port(), ""
    commands = [shlex.split(line) for line in RECIPES[name].replace("\\\n", " ").splitlines()]
    try:
        for program, *words in commands:
            arguments = [word.replace("localhost:8080", f"127.0.0.1:{port}") for word in words]
            settings = ["package.builder=none", f"deploy.port={port}"] if words[2:4] == ["run", "all"] else []
            command = [*(PIPE if program == "pipe" else (program,)), *arguments, *settings]
            done = subprocess.run(
                command, cwd=tmp_path, env=environment({}), capture_output=True, text=True, timeout=600, check=False
            )
            assert done.returncode == 0, f"{shlex.join(command)}\n{done.stderr}"
            printed += done.stdout
    finally:
        project = next(iter(path.parent.name for path in tmp_path.glob("*/pipe.yaml")), ".")
        subprocess.run([*PIPE, "-C", project, "stop"], cwd=tmp_path, env=environment({}), capture_output=True)
    for part in filter(None, ANSWERS[name].split("…")):
        assert part in printed
