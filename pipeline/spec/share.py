"""A share of the requests, as people write it: `10%` or `0.1`."""

from __future__ import annotations

import re


def share_of(text: str) -> float:
    """From 0 to 1."""
    found = re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]{1,9})?)\s*(%?)", text.strip())
    share = float(found[1]) / (100 if found[2] else 1) if found else 2.0
    if share > 1:
        raise ValueError(f"{text!r} is no share; write it as in 10% or 0.1, at most 100%")
    return share
