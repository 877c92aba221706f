"""Who may come in, and whether what is said can be overheard: API keys and TLS, where they are set."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import grpc
from grpc import StatusCode, aio

from serve.keys import OPEN_RPCS, Keys
from serve.options import Options
from serve.refusal import Unauthorized
from serve.renewal import Renewed
from serve.tls import Tls
from serve.watch import request_id


@dataclass(frozen=True)
class Door:
    keys: Keys | None = None
    tls: Tls | None = None

    @classmethod
    def of(cls, options: Options) -> Door:
        """Reads the files at once, so that a wrong one is said before anything else is done."""
        keys = None if options.api_keys is None else Keys(options.api_keys)
        return cls(keys, None if options.tls is None else Tls(options.tls))

    @property
    def scheme(self) -> str:
        return "http" if self.tls is None else "https"

    @property
    def headers(self) -> list[tuple[str, str]]:
        """Of every HTTP answer."""
        private = [("cache-control", "no-store")] if self.keys else []  # what a key was needed for is not kept
        return [("x-content-type-options", "nosniff"), *private]

    @property
    def interceptors(self) -> list[Any]:
        return [KeyAsked(self.keys)] if self.keys else []

    def renewed(self) -> list[Renewed]:
        """What is read anew when its files change."""
        found = []
        if self.keys:
            found.append(Renewed("serve.api_keys", (self.keys.path,), self.keys.reload))
        if self.tls:
            pair = self.tls.pair
            found.append(Renewed("serve.tls_certificate", (pair.certificate, pair.key), self.tls.reload))
        return found

    def listen(self, server: Any, address: str) -> None:
        """Add the port to a gRPC server; RuntimeError where it is taken."""
        if self.tls is None:
            server.add_insecure_port(address)
        else:
            server.add_secure_port(address, self.tls.grpc_credentials())


class KeyAsked(aio.ServerInterceptor):  # type: ignore[misc]  # grpc ships no types
    """The same keys in the metadata of a gRPC call."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        if details.method.rpartition("/")[2] not in OPEN_RPCS:
            headers = {key.encode(): _bytes(value) for key, value in details.invocation_metadata}
            try:
                self._keys.admit(headers)
            except Unauthorized as refusal:
                return _refused(str(refusal), request_id(headers.get(b"x-request-id")).decode())
        return await continuation(details)


def _refused(text: str, made: str) -> Any:
    async def answer(_: Any, context: Any) -> None:
        await context.send_initial_metadata([("x-request-id", made)])
        await context.abort(StatusCode.UNAUTHENTICATED, text)

    return grpc.unary_unary_rpc_method_handler(answer)


def _bytes(value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()
