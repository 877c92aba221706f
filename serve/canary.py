"""A new version beside the current one, with a share of the requests that name no version."""

from __future__ import annotations

import asyncio
import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from serve.model_version import Call, ModelVersion


class Canary:
    """The same request id always meets the same version, on every server of this bundle and after every restart.

    Who asks at 10 % asks at 20 % as well; another candidate gets another tenth of the ids.
    """

    def __init__(self, candidate: ModelVersion, share: float) -> None:
        self.candidate, self.share = candidate, share

    def takes(self, key: bytes) -> bool:
        return place_of(self.candidate.bundle.digest, key) < self.share


def place_of(salt: str, key: bytes) -> float:
    """Where between 0 and 1 an id stands; ids spread evenly."""
    found = hashlib.blake2b(key, digest_size=8, key=salt.encode()[:64]).digest()
    return (int.from_bytes(found, "big") >> 11) / (1 << 53)  # 53 bits are what a float holds


async def choose(served: ModelVersion, call: Call, request_id: bytes) -> ModelVersion:
    """Who answers a call that names no version: by the id in its body, else by that of the request, given or drawn."""
    if served.canary is None:
        return served
    if call.quick:
        key = call.key()
    else:
        key = await asyncio.get_running_loop().run_in_executor(served.pool, call.key)
    return choose_by(served, key.encode() or request_id)


def choose_by(served: ModelVersion, key: bytes) -> ModelVersion:
    """Who answers what has this id."""
    canary = served.canary
    return canary.candidate if canary is not None and canary.takes(key) else served
