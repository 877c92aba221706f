"""Telling the running service what to serve, over the admin interface it was started with."""

from __future__ import annotations

import http.client
import json
from pathlib import Path
from typing import Any

from pipeline.service import Live
from pipeline.spec.errors import StageError

_ADMIN_HOST = "127.0.0.1"  # and nowhere else
_QUICK_SECONDS = 10.0


class Admin:
    """Every refusal is a StageError with the service's own sentence."""

    def __init__(self, live: Live, load_seconds: float = 120) -> None:
        self._live, self._load_seconds = live, load_seconds

    def answers(self) -> bool:
        """Whether there is anybody to tell something."""
        try:
            self.status()
        except StageError:
            return False
        return True

    def status(self) -> dict[str, Any]:
        """Of the one model that `pipe deploy` keeps."""
        found: dict[str, Any] = self._ask("GET", "/")["models"][self._live.name]
        return found

    def version_of(self, digest: str) -> str:
        """The version made of this bundle; empty where none is loaded."""
        versions = self.status()["versions"].items()
        return next((version for version, one in versions if one["bundle"] == digest), "")

    def load(self, bundle: Path) -> str:
        """Proven beside what serves; returns its version. Nobody meets it yet."""
        return str(self._post("/load", bundle=str(bundle.resolve()))["version"])

    def switch(self, version: str) -> None:
        self._post("/switch", version=version)

    def canary(self, version: str, share: float) -> None:
        self._post("/canary", version=version, share=share)

    def shadow(self, bundle: Path | None, share: float = 1.0) -> None:
        self._post("/shadow", share=share, **({} if bundle is None else {"bundle": str(bundle.resolve())}))

    def forget(self) -> None:
        """What was loaded and gets no requests."""
        self._post("/forget")

    def _post(self, path: str, **fields: Any) -> Any:
        return self._ask("POST", path, {"model": self._live.name, **fields})

    def _ask(self, method: str, path: str, body: Any = None) -> Any:
        live = self._live
        seconds = self._load_seconds if path in ("/load", "/shadow") else _QUICK_SECONDS
        connection = http.client.HTTPConnection(_ADMIN_HOST, live.admin_port, timeout=seconds)
        try:
            headers = {"authorization": f"Bearer {Path(live.token).read_text().strip()}"}
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            found = json.loads(answer.read())
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise StageError(f"the service (pid {live.pid}) does not answer on its admin port: {error}") from error
        finally:
            connection.close()
        if answer.status != http.client.OK:
            raise StageError(str(found.get("error", found)))
        return found
