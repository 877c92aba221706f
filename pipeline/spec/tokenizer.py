"""A tokenizer.json of the `tokenizers` package: which ids it can give."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pipeline.spec.errors import ConfigError

NAME = "tokenizer.json"


def ids_of(path: Path) -> list[int]:
    """Of tokens and of the special ones beside them."""
    try:
        body: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        words = body["model"]["vocab"]
        found = list(words.values()) if isinstance(words, dict) else list(range(len(words)))
        return [0, *found, *(token["id"] for token in body.get("added_tokens") or [])]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: not a tokenizer of the `tokenizers` package: {error!r}") from error
