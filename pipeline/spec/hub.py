"""Finding the folder of pretrained weights: a folder, a project's run, or the Hugging Face hub's cache."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from pipeline.spec.errors import ConfigError, ResourceError
from pipeline.spec.model import Model
from pipeline.spec.pretrained import INDEX, SMALL
from pipeline.spec.trained import is_project, run_of

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_COMMIT = re.compile(r"[0-9a-f]{40}")


def hub_id(model: Model, root: Path) -> str:
    """The id, where the word is one and no folder of the project bears its name."""
    word = model.pretrained
    return word if _HUB_ID.fullmatch(word) and not (root / word).exists() else ""


def locate(model: Model, root: Path, commit: str = "", files: Iterable[str] = (), run: str = "") -> Path:
    """The folder. With a commit or a run, the one that prepare took.

    A commit is asked for again where one of `files` is not here; of a project of ours the folder is that of a run.
    """
    identifier = hub_id(model, root)
    if not identifier:
        if model.revision:
            raise ConfigError(f"model.revision is of a Hugging Face id; {model.pretrained} is a folder: leave it out")
        named = root / Path(model.pretrained).expanduser()
        return run_of(named, model.pretrained, run).path if is_project(named) else named
    if commit:
        cached = _ask(identifier, commit, local=True)
        if cached and all((cached / name).is_file() for name in files):
            return cached
    folder = _ask(identifier, commit or model.revision, local=False)
    assert folder is not None
    return folder


def commit_of(folder: Path) -> str:
    """Of a folder of the hub's cache; nothing of any other."""
    return folder.name if _COMMIT.fullmatch(folder.name) and folder.parent.name == "snapshots" else ""


def _ask(identifier: str, revision: str, local: bool) -> Path | None:
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ResourceError(
            f"model.pretrained={identifier}: no such folder, and to fetch it from Hugging Face, `huggingface_hub` is "
            "missing; `pip install pipe-road[deepseek]` brings it"
        ) from None
    wanted = [*SMALL, INDEX, "*.safetensors"]
    try:
        found = snapshot_download(
            identifier,
            revision=revision or None,
            allow_patterns=wanted,
            ignore_patterns=["*/*"],
            local_files_only=local,
        )
    except (OSError, ValueError) as error:
        if local:
            return None
        told = " ".join(str(error).split())[:300]
        raise ResourceError(
            f"model.pretrained={identifier}: no such folder in the project, and Hugging Face gave no "
            f"{revision or 'files'} of it ({told}); where this machine has no way there, copy config.json, the "
            "tokenizer and the safetensors into a folder and name that in model.pretrained"
        ) from error
    return Path(found)
