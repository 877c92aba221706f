"""Access to a service: API keys, TLS and signature keys from files, and connections of our own to it."""

from __future__ import annotations

import http.client
import os
import ssl
from pathlib import Path

from pipeline.contract.settings.section import Frozen
from pipeline.contract.settings.stages import Serve
from pipeline.contract.signing import Trust
from pipeline.system.errors import ConfigError
from pipeline.system.files import digest_bytes

KEY_VARIABLE = "PIPE_API_KEY"


class Access(Frozen):
    """Paths of the key files, absolute; empty if not set."""

    api_keys: str = ""
    tls_certificate: str = ""
    tls_key: str = ""
    require_signature: str = ""  # of public keys

    @classmethod
    def from_settings(cls, serve: Serve, root: Path) -> Access:
        """Return the paths of the configuration, which are relative to the project, and check that they exist."""
        values = {name: getattr(serve, name) for name in cls.model_fields}
        if bool(serve.tls_certificate) != bool(serve.tls_key):
            raise ConfigError("serve.tls_certificate and serve.tls_key go together; give both or neither")
        paths = {name: str((root / value).absolute()) for name, value in values.items() if value}
        for name, path in paths.items():
            if not Path(path).is_file():
                raise ConfigError(f"serve.{name}: {path}: no such file")
        return cls(**paths)

    @property
    def options(self) -> list[str]:
        """Return the options of `python -m serve`."""
        options = ((f"--{name.replace('_', '-')}", getattr(self, name)) for name in type(self).model_fields)
        return [argument for option, path in options if path for argument in (option, path)]

    @property
    def trust(self) -> Trust | None:
        """Return the keys one of which must have signed a bundle."""
        return Trust(Path(self.require_signature)) if self.require_signature else None

    @property
    def scheme(self) -> str:
        return "https" if self.tls_certificate else "http"

    @property
    def without_tls(self) -> Access:
        return self.model_copy(update={"tls_certificate": "", "tls_key": ""})

    def connection(self, host: str, port: int, timeout_seconds: float) -> http.client.HTTPConnection:
        if not self.tls_certificate:
            return http.client.HTTPConnection(host, port, timeout=timeout_seconds)
        # The certificate itself identifies the service, not a host name: it runs on this machine.
        context = ssl.create_default_context(cafile=self.tls_certificate)
        context.check_hostname = False
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        return http.client.HTTPSConnection(host, port, timeout=timeout_seconds, context=context)

    def headers(self) -> dict[str, str]:
        """Return the headers that authenticate our own requests."""
        return {"x-api-key": self._own_key()} if self.api_keys else {}

    def _own_key(self) -> str:
        clear = (line for line in self._lines() if not line.startswith("sha256:"))
        if not (key := os.environ.get(KEY_VARIABLE) or next(clear, "")):
            raise ConfigError(f"serve.api_keys: {self.api_keys} has only hashes; set {KEY_VARIABLE} to one of the keys")
        return key

    def hashed_keys(self) -> str:
        """Return the file with every key replaced by its hash."""
        hashes = (
            line if line.startswith("sha256:") else f"sha256:{digest_bytes(line.encode())}" for line in self._lines()
        )
        return "".join(f"{line}\n" for line in hashes)

    def _lines(self) -> list[str]:
        lines = map(str.strip, Path(self.api_keys).read_text().splitlines())
        return [line for line in lines if line and not line.startswith("#")]


OPEN_ACCESS = Access()  # no API key, no TLS
