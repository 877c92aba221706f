"""Names that Kubernetes takes: what is too long or has strange letters is changed the same way every time."""

from __future__ import annotations

import re

from pipeline.spec.digest import digest_bytes

LABEL = 63  # DNS-1035: a Service, a host name, the value of a label
JOB = 52  # with `-` and a pod's number, and the five letters that end a pod's name
JOBSET = 45  # with `-node-0-9999-`, and those letters

_HASH = 8


def fitting(text: str, limit: int = LABEL) -> str:
    """A DNS-1035 label: small letters, digits and dashes, a letter first.

    A name that fits stays as it is. Any other gets a hash of the whole, so that two names never become one.
    """
    plain = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    if plain and not plain[0].isalpha():
        plain = f"x-{plain}"
    if plain and plain == text and len(plain) <= limit:
        return plain
    head = plain[: limit - _HASH - 1].rstrip("-") or "x"
    return f"{head}-{digest_bytes(text.encode())[:_HASH]}"
