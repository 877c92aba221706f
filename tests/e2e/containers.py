"""Real containers on a machine with root and Debian's tools: a base image, builds, a registry, pods of one container.

Everything lies in one folder, the tools' own storage included, and goes with it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pipeline.service.process import send_request
from tests.ports import free_port

from .project_folder import wait_for

TOOLS = ("debootstrap", "buildah", "podman", "runc", "docker-registry")
BASE = "localhost/base:1"
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
_SUITE, _MIRROR = "bookworm", "http://deb.debian.org/debian"
# A container as a restricted pod has it, on a machine whose kernel gives no more than this.
_RESTRICTED = (
    "--network", "host", "--ulimit", "nofile=20000:20000", "--ulimit", "nproc=4096:4096",
    "--read-only", "--cap-drop", "all", "--security-opt", "no-new-privileges",
)  # fmt: skip


def why_not() -> str:
    """Return why containers cannot be built and run here; empty if they can."""
    if os.geteuid() != 0:
        return "building a base image needs root"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    return f"not installed: {', '.join(missing)}; Debian has them" if missing else ""


@dataclass(frozen=True)
class Containers:
    folder: Path

    @classmethod
    def make(cls, folder: Path) -> Containers:
        (folder / "storage.conf").write_text(
            f'[storage]\ndriver = "overlay"\ngraphroot = "{folder}/images"\nrunroot = "{folder}/running"\n'
        )
        # crun, the other runtime, cannot work with the control groups of every machine.
        (folder / "containers.conf").write_text('[engine]\nruntime = "runc"\ncgroup_manager = "cgroupfs"\n')
        return cls(folder)

    @property
    def env(self) -> dict[str, str]:
        return {
            "CONTAINERS_STORAGE_CONF": str(self.folder / "storage.conf"),
            "CONTAINERS_CONF": str(self.folder / "containers.conf"),
            "BUILDAH_ISOLATION": "chroot",
        }

    def call(self, *argv: str, expect: int = 0, seconds: float = 300) -> str:
        done = subprocess.run(
            argv, env={**os.environ, **self.env}, capture_output=True, text=True, timeout=seconds, check=False
        )
        assert done.returncode == expect, f"{argv}: {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout.strip()

    def make_base(self) -> None:
        """Build a base image: Debian with Python, pip, and this machine's package index and certificates."""
        root = self.folder / "root"
        packages = "--include=python3,python3-pip,ca-certificates"
        self.call("debootstrap", "--variant=minbase", packages, _SUITE, str(root), _MIRROR, seconds=1100)
        (root / "usr" / "local" / "bin" / "python").symlink_to("/usr/bin/python3")
        for file in (CERTIFICATES, Path("/etc/pip.conf")):
            if file.is_file():
                shutil.copyfile(file, root / file.relative_to("/"))
        context = self.folder / "base"
        context.mkdir()
        self.call("tar", "-C", str(root), "-cf", str(context / "base.tar"), ".")
        (context / "Dockerfile").write_text("FROM scratch\nADD base.tar /\n")
        self.call("buildah", "build", "--tag", BASE, str(context))
        shutil.rmtree(context)
        shutil.rmtree(root)

    @contextlib.contextmanager
    def mounted(self, image: str) -> Iterator[Path]:
        name = self.call("buildah", "from", image)
        try:
            yield Path(self.call("buildah", "mount", name))
        finally:
            self.call("buildah", "rm", name)

    @contextlib.contextmanager
    def running(self, *words: str) -> Iterator[subprocess.Popen[str]]:
        """Run an image with `podman run`; a container that is still running at the end is killed."""
        process = subprocess.Popen(
            ["podman", "run", "--rm", *_RESTRICTED, *words],
            env={**os.environ, **self.env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            yield process
        finally:
            self.call("podman", "rm", "--force", "--all", "--time", "0")
            process.communicate(timeout=300)

    def run(self, *words: str) -> str:
        return self.call("podman", "run", "--rm", *_RESTRICTED, *words)

    def clear(self) -> None:
        self.call("podman", "rm", "--force", "--all", "--time", "0")
        self.call("buildah", "rm", "--all")
        self.call("podman", "rmi", "--force", "--all")
        for place in ("images/overlay", "running/overlay"):  # which the storage mounts on itself
            subprocess.run(["umount", str(self.folder / place)], capture_output=True, check=False)


@contextlib.contextmanager
def registry(folder: Path) -> Iterator[str]:
    """Run Debian's registry on a free port; yield its address."""
    port = free_port()
    config = folder / "registry.yml"
    config.write_text(
        f"version: 0.1\nlog: {{level: error}}\nstorage: {{filesystem: {{rootdirectory: {folder}/registry}}}}\n"
        f"http: {{addr: '127.0.0.1:{port}'}}\n"
    )
    with (folder / "registry.log").open("w") as log:
        process = subprocess.Popen(["docker-registry", "serve", str(config)], stdout=log, stderr=log)
        try:
            wait_for(lambda: _answers(port))
            yield f"127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(timeout=300)


def _answers(port: int) -> bool:
    try:
        return send_request("127.0.0.1", port, "GET", "/v2/")[0] == 200
    except OSError:
        return False


def wheel_for_cpu(env: Mapping[str, str]) -> Path | None:
    """Return the path of a wheel of torch without CUDA; the one of the index installs gigabytes of CUDA."""
    for place in env.get("PIP_FIND_LINKS", "").split():
        if found := sorted(Path(place).glob("torch-*+cpu-*.whl")):
            return found[-1]
    return None


def megabytes(folder: Path) -> float:
    """Return the disk usage in whole blocks, counting hard links once."""
    sizes = {}
    for parent, _, names in os.walk(folder):
        for name in names:
            state = (Path(parent) / name).lstat()
            sizes[(state.st_dev, state.st_ino)] = state.st_blocks * 512
    return sum(sizes.values()) / 1e6
