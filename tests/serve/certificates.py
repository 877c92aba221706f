"""Certificates for tests, by the openssl command."""

from __future__ import annotations

import subprocess
from pathlib import Path

from serve.security import CertificatePair


def make(folder: Path, name: str, *protection: str) -> CertificatePair:
    """Make a self-signed certificate for this name and this machine."""
    pair = CertificatePair(folder / "tls.crt", folder / "tls.key")
    argv = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-days", "2"]
    argv += ["-subj", f"/CN={name}", "-addext", f"subjectAltName=DNS:{name},IP:127.0.0.1"]
    argv += ["-keyout", str(pair.key), "-out", str(pair.certificate), *(protection or ["-nodes"])]
    subprocess.run(argv, check=True, capture_output=True)
    return pair
