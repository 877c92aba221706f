"""The base of every record that is read from or written to a file."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Frozen(BaseModel):
    """Cannot be changed, and refuses fields it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)
