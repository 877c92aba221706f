"""`host:port`, as people write it."""

from __future__ import annotations

from pipeline.spec.errors import ConfigError


def split_address(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f"train.rendezvous={address}: write it as host:port")
    return host.strip("[]"), int(port)
