"""A tokenizer and the model it feeds: every id it can give is one the model knows."""

from __future__ import annotations

from pathlib import Path

from pipeline.spec.errors import ConfigError
from pipeline.spec.signature import Signature
from pipeline.spec.tokenizer import ids_of


def check_tokenizer(bundle: Path, signature: Signature) -> None:
    """Of a language model's bundle; one without is left alone."""
    generation = signature.generation
    if generation is None:
        return
    path = bundle / generation.tokenizer
    if not path.is_file():
        raise ConfigError(
            f"the bundle of a language model needs {generation.tokenizer}: let the task's make_files() write it, and "
            'name it in the codec, as in files = ("tokenizer.json",)'
        )
    logits = next(spec for spec in signature.outputs if spec.name == generation.logits)
    known, highest = logits.shape[-1], max((*ids_of(path), *generation.begin, *generation.end))
    if isinstance(known, int) and highest >= known:
        raise ConfigError(f"{path.name}: has the id {highest}, but the model knows {known} ids (0 to {known - 1})")
