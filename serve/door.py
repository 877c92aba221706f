"""Who may come in, and whether what is said can be overheard: API keys and TLS, where they are set."""

from __future__ import annotations

from dataclasses import dataclass

from serve.keys import Keys
from serve.options import Options
from serve.renewal import Renewed
from serve.tls import Tls


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

    def renewed(self) -> list[Renewed]:
        """What is read anew when its files change."""
        found = []
        if self.keys:
            found.append(Renewed("serve.api_keys", (self.keys.path,), self.keys.reload))
        if self.tls:
            pair = self.tls.pair
            found.append(Renewed("serve.tls_certificate", (pair.certificate, pair.key), self.tls.reload))
        return found
