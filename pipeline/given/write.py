"""Write the project for a model that exists already, in a process of its own, which loads torch."""

from __future__ import annotations

import filecmp
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from pipeline.system.errors import ConfigError


def write_project(source: str, folder: Path, name: str, **options: Any) -> None:
    """Write the project, unless the same one is there; leave nothing where that fails.

    The options are the other fields of `pipeline.given.sources.Request`.
    """
    folder.resolve().parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".export-", dir=folder.resolve().parent) as temporary:
        written = Path(temporary, "project")
        written.mkdir()
        request = {"source": source, "folder": str(written), "name": name, **options}
        command = [sys.executable, "-m", "pipeline.given.sources", json.dumps(request)]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            is_error = done.stdout.startswith("{")
            raise ConfigError(json.loads(done.stdout)["error"] if is_error else f"{source}: the model cannot be read")
        files = [path.relative_to(written) for path in sorted(written.rglob("*")) if path.is_file()]
        if not any((folder / file).exists() for file in files):
            shutil.copytree(written, folder, dirs_exist_ok=True)
        elif changed := sorted({*files} - {*filecmp.cmpfiles(written, folder, files, shallow=False)[0]}):
            raise ConfigError(
                f"{folder / changed[0]}: is not what {source} needs; to fix it: give another folder with --to, or run "
                f"the project that is there with `pipe -C {folder} run export`"
            )
