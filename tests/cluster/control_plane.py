"""A Kubernetes control plane without nodes on 127.0.0.1: etcd and kube-apiserver, with its controllers if present.

It needs no rights. The programs are on PATH, or in an archive beside the checkout or at PIPE_TEST_CLUSTER_ARCHIVE.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import secrets
import shutil
import ssl
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import yaml

from pipeline.system.sources import SOURCE_ROOT
from tests.ports import free_port

_START_TIMEOUT_SECONDS = 120
_STOP_TIMEOUT_SECONDS = 30
_OPTIONAL = ("kube-controller-manager", "kube-scheduler")
_ARCHIVE = SOURCE_ROOT.parent / "shared" / "cluster" / "cluster.tar.zst"
_ARCHIVE_FILES = ("./bin/etcd", "./bin/hyperkube")  # hyperkube is all programs of Kubernetes, by its name


def missing_binaries() -> list[str]:
    return [name for name in ("etcd", "kube-apiserver", "openssl") if shutil.which(name) is None]


def unpack_binaries(folder: Path) -> str:
    """Unpack the archive's programs into a folder; return why that is impossible, or nothing."""
    archive = Path(os.environ.get("PIPE_TEST_CLUSTER_ARCHIVE", _ARCHIVE))
    if not archive.is_file():
        return f"there is no archive {archive}"
    argv = ["tar", "-x", "-f", str(archive), "-C", str(folder), *_ARCHIVE_FILES]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        return f"{archive}: {done.stderr.strip()}"
    for name in ("kube-apiserver", *_OPTIONAL):
        (folder / "bin" / name).symlink_to("hyperkube")
    try:
        subprocess.run([folder / "bin" / "etcd", "--version"], check=True, capture_output=True)
    except OSError as error:  # it is for one operating system and processor
        return f"{archive}: {error}"
    return ""


class ControlPlane:
    def __init__(self, folder: Path) -> None:
        self.folder, self.port, self.token = folder, free_port(), secrets.token_hex(16)
        self.kubeconfig = folder / "kubeconfig"
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        self._make_keys()
        etcd, peer = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
        self._run(
            "etcd", f"--data-dir={self.folder / 'etcd'}", f"--listen-client-urls={etcd}",
            f"--advertise-client-urls={etcd}", f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}", f"--initial-cluster=default={peer}", "--unsafe-no-fsync",
        )  # fmt: skip
        self._run(
            "kube-apiserver", f"--etcd-servers={etcd}", "--bind-address=127.0.0.1", "--advertise-address=127.0.0.1",
            f"--secure-port={self.port}", "--authorization-mode=RBAC", f"--token-auth-file={self.folder / 'tokens'}",
            f"--tls-cert-file={self.folder / 'tls.crt'}", f"--tls-private-key-file={self.folder / 'tls.key'}",
            "--service-account-issuer=https://kubernetes.default.svc", "--service-cluster-ip-range=10.0.0.0/24",
            f"--service-account-key-file={self.folder / 'tokens.key'}",
            f"--service-account-signing-key-file={self.folder / 'tokens.key'}",
        )  # fmt: skip
        self._wait_until_ready()
        for name in _OPTIONAL:
            if shutil.which(name):
                keys = [f"--service-account-private-key-file={self.folder / 'tokens.key'}"] * ("manager" in name)
                options = ["--leader-elect=false", "--bind-address=127.0.0.1", f"--secure-port={free_port()}"]
                self._run(name, f"--kubeconfig={self.kubeconfig}", *options, *keys)

    def stop(self) -> None:
        for process in reversed(self._processes):
            process.terminate()
            try:
                process.wait(_STOP_TIMEOUT_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _make_keys(self) -> None:
        """Make the server's certificate, the key of service account tokens, and a kubeconfig for an administrator."""
        names = "subjectAltName=IP:127.0.0.1,DNS:localhost,DNS:kubernetes.default.svc"
        server = ["req", "-x509", "-nodes", "-newkey", "rsa:2048", "-days", "2", "-subj", "/CN=kube-apiserver"]
        server += ["-addext", names, "-keyout", str(self.folder / "tls.key"), "-out", str(self.folder / "tls.crt")]
        for argv in (server, ["genrsa", "-out", str(self.folder / "tokens.key"), "2048"]):
            subprocess.run(["openssl", *argv], check=True, capture_output=True)
        (self.folder / "tokens").write_text(f'{self.token},admin,admin,"system:masters"\n')
        cluster = {"server": f"https://127.0.0.1:{self.port}", "certificate-authority": str(self.folder / "tls.crt")}
        body = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": "admin", "user": {"token": self.token}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "admin"}}],
        }
        self.kubeconfig.write_text(yaml.safe_dump(body))

    def _run(self, name: str, *options: str) -> None:
        with (self.folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen([name, *options], stdout=log, stderr=log, cwd=self.folder)
        self._processes.append(process)

    def _wait_until_ready(self) -> None:
        tls, deadline = ssl.create_default_context(cafile=str(self.folder / "tls.crt")), time.monotonic()
        deadline += _START_TIMEOUT_SECONDS
        while time.monotonic() < deadline and all(process.poll() is None for process in self._processes):
            connection = http.client.HTTPSConnection("127.0.0.1", self.port, timeout=5, context=tls)
            with contextlib.suppress(OSError, http.client.HTTPException), contextlib.closing(connection):
                connection.request("GET", "/readyz", headers={"Authorization": f"Bearer {self.token}"})
                if connection.getresponse().status == 200:
                    return
            time.sleep(0.5)
        log = (self.folder / "kube-apiserver.log").read_text(errors="replace")
        raise AssertionError(f"the API server did not get ready:\n{log[-2000:]}")


@contextlib.contextmanager
def run_control_plane(folder: Path) -> Iterator[ControlPlane]:
    plane = ControlPlane(folder)
    try:
        plane.start()
        yield plane
    finally:
        plane.stop()
