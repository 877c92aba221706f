"""Container builders: which of them really works here, the command that builds an image, and running it."""

from __future__ import annotations

import shutil
import subprocess
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

BUILDERS = ("docker", "podman", "buildah")

_ANSWER_SECONDS = 30
_TAIL_LINES = 15
# Passed on by name: the builder reads the values itself, so that a password in a URL reaches no file and no argv.
_PASSED_ON = (
    "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_TRUSTED_HOST",
    "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy",
)  # fmt: skip


@dataclass(frozen=True)
class Search:
    """The first builder that works, or why none does."""

    builder: str | None
    refusals: tuple[str, ...]

    @property
    def reason(self) -> str:
        return "; ".join(self.refusals)


@dataclass(frozen=True)
class Built:
    image_digest: str | None  # None: the build failed
    tail: tuple[str, ...]  # the builder's last lines


def find_builder(wanted: str, env: Mapping[str, str]) -> Search:
    """Look for one builder by name, or with `auto` for each in turn."""
    refusals: list[str] = []
    for name in BUILDERS if wanted == "auto" else (wanted,):
        refusal = _refusal(name, env)
        if refusal is None:
            return Search(name, tuple(refusals))
        refusals.append(refusal)
    return Search(None, tuple(refusals))


def build_argv(builder: str, image: str, context: Path, env: Mapping[str, str]) -> list[str]:
    """The same command whoever runs it, but for what the environment adds."""
    passed = [part for name in _PASSED_ON if env.get(name) for part in ("--build-arg", name)]
    return [builder, "build", "--tag", image, *passed, str(context)]


def build(builder: str, image: str, context: Path, id_file: Path, env: Mapping[str, str]) -> Built:
    """Run it, its output going where ours goes; the image is known by the digest the builder leaves in a file."""
    argv = build_argv(builder, image, context, env)
    argv[2:2] = ["--iidfile", str(id_file)]
    tail: deque[str] = deque(maxlen=_TAIL_LINES)
    with subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        errors="replace", env=dict(env),
    ) as process:  # fmt: skip
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            tail.append(line.rstrip())
    if process.returncode != 0 or not id_file.is_file():
        return Built(None, (*tail, f"{builder} ended with status {process.returncode}"))
    digest = id_file.read_text().strip().removeprefix("sha256:")  # buildah leaves the prefix out
    id_file.unlink()
    return Built(f"sha256:{digest}", tuple(tail))


def _refusal(name: str, env: Mapping[str, str]) -> str | None:
    """Why a builder cannot be used; None when it can. A client alone builds nothing: its engine must answer."""
    path = shutil.which(name, path=env.get("PATH", ""))
    if path is None:
        return f"{name} is not installed"
    engine = "its daemon does not answer" if name == "docker" else "it does not work here"
    try:
        done = subprocess.run(
            [path, "info"], stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            timeout=_ANSWER_SECONDS, check=False, env=dict(env),
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{name} is installed but {engine} ({type(error).__name__})"
    if done.returncode == 0:
        return None
    said = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
    return f"{name} is installed but {engine}" + (f" ({said[-1][:200]})" if said else "")
