"""Container builders: which of them really works here, and having one build, save and push an image."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from k8s.reference import Reference, parse
from pipeline.spec.errors import StageError

BUILDERS = ("docker", "podman", "buildah")

_ANSWER_SECONDS = 30
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
    said: str  # the last thing the builder said


def find_builder(wanted: str, env: Mapping[str, str]) -> Search:
    """Look for one builder by name, or with `auto` for each in turn."""
    refusals: list[str] = []
    for name in BUILDERS if wanted == "auto" else (wanted,):
        refusal = _refusal(name, env)
        if refusal is None:
            return Search(name, tuple(refusals))
        refusals.append(refusal)
    return Search(None, tuple(refusals))


@dataclass(frozen=True)
class Work:
    """What is built, of what, and what is said of it."""

    image: str
    context: Path
    annotations: Mapping[str, str]
    base: str = ""  # in place of the one that the Dockerfile names


def annotates(builder: str, env: Mapping[str, str]) -> bool:
    """Docker writes its own kind of manifest, which has no annotations, unless its buildx makes the image."""
    if builder != "docker":
        return True
    argv = ["docker", "buildx", "build", "--help"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=_ANSWER_SECONDS, check=False, env=dict(env))
    return done.returncode == 0 and "--annotation" in done.stdout


def build_argv(builder: str, work: Work, env: Mapping[str, str], *, annotated: bool) -> list[str]:
    """The same command whoever runs it, but for what the environment adds."""
    passed = [part for name in _PASSED_ON if env.get(name) for part in ("--build-arg", name)]
    if work.base:
        passed += ["--build-arg", f"BASE={work.base}"]
        passed += ["--tls-verify=false"] if builder != "docker" and parse(work.base).plain else []
    if annotated:
        passed += [
            part for name, value in sorted(work.annotations.items()) for part in ("--annotation", f"{name}={value}")
        ]
    by_buildx = builder == "docker" and annotated
    # An attestation would make an index of the image, whose digest is another one than the image's.
    command = ["docker", "buildx", "build", "--load", "--provenance=false"] if by_buildx else [builder, "build"]
    return [*command, "--tag", work.image, *passed, str(work.context)]


def build(builder: str, work: Work, id_file: Path, env: Mapping[str, str]) -> Built:
    """Run it, its output going where ours goes; the image is known by the digest the builder leaves in a file."""
    argv = build_argv(builder, work, env, annotated=annotates(builder, env))
    argv[-1:-1] = ["--iidfile", str(id_file)]
    status, last = _run(argv, env)
    if status != 0 or not id_file.is_file():
        return Built(None, f"{builder} ended with status {status}: {last}")
    digest = id_file.read_text().strip().removeprefix("sha256:")  # buildah leaves the prefix out
    id_file.unlink()
    return Built(f"sha256:{digest}", last)


def save(builder: str, image: str, archive: Path, env: Mapping[str, str]) -> None:
    """The image as one file to look into: in Docker's form, in which nobody compresses the layers."""
    argv = {
        "docker": ["docker", "save", "--output", str(archive), image],
        "podman": ["podman", "save", "--quiet", "--format", "docker-archive", "--output", str(archive), image],
        "buildah": ["buildah", "push", "--quiet", image, f"docker-archive:{archive}"],
    }[builder]
    archive.unlink(missing_ok=True)  # podman adds to what is there
    status, last = _run(argv, env)
    if status != 0:
        raise StageError(f"{builder} built {image} but cannot save it to {archive} (status {status}: {last})")


def push(builder: str, image: str, digest_file: Path, env: Mapping[str, str]) -> str:
    """To the registry its name says; returns the digest the registry knows it by."""
    reference = parse(image)
    if builder == "docker":
        argv = ["docker", "push", image]  # speaks to this machine's registries without TLS by itself
    else:
        argv = [builder, "push", "--digestfile", str(digest_file)]
        argv += [*(["--tls-verify=false"] if reference.plain else []), image, f"docker://{image}"]
    status, last = _run(argv, env)
    if status != 0:
        raise StageError(
            f"{builder} could not push {image} (status {status}: {last}); is the registry up, and are we logged in "
            f"(`{builder} login {reference.host}`)?"
        )
    if builder == "docker":
        return _docker_digest(image, reference, env)
    digest = digest_file.read_text().strip()
    digest_file.unlink()
    return digest


def _docker_digest(image: str, reference: Reference, env: Mapping[str, str]) -> str:
    argv = ["docker", "image", "inspect", "--format", "{{json .RepoDigests}}", image]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=_ANSWER_SECONDS, check=False, env=dict(env))
    found = [parse(name) for name in (json.loads(done.stdout) or [])] if done.returncode == 0 else []
    for name in found:
        if (name.host, name.repository) == (reference.host, reference.repository):
            return name.digest
    raise StageError(
        f"docker pushed {image} but does not tell its digest: {done.stderr.strip() or done.stdout.strip()}"
    )


def _run(argv: list[str], env: Mapping[str, str]) -> tuple[int, str]:
    """Its status, and the last thing it said; all it says is in our own output as it comes."""
    last = "it said nothing"
    with subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        errors="replace", env=dict(env),
    ) as process:  # fmt: skip
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            last = line.strip() or last
    return process.returncode, last[:300]


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
