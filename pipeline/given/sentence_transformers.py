"""Read a folder in the layout of sentence-transformers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from pipeline.system.errors import ConfigError

_SUPPORTED = ["Transformer", "Pooling", "Normalize"]
_POOLING = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
_DECODERS = ("t5", "mt5", "clip", "siglip")  # AutoModel of these needs more than the ids of a text
_SETTINGS = "sentence_bert_config.json"
_LONGEST = 1 << 20  # tokens of a text; transformers writes a larger number where it knows none


def read_sentence_transformer(folder: Path) -> tuple[Path, dict[str, Any]]:
    """Return the folder of the transformer and the facts of model.json; raise ConfigError for what is not supported."""
    modules = _read(folder / "modules.json")
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise ConfigError(f"{folder / 'modules.json'}: must hold a list of modules")
    kinds = [str(module.get("type")).rpartition(".")[2] for module in modules]
    if unsupported := [kind for kind in kinds if kind not in _SUPPORTED]:
        raise ConfigError(
            f"{folder / 'modules.json'}: the module {unsupported[0]} is not supported; supported are "
            f"{', '.join(_SUPPORTED)}; to fix it: write its layer in task.py, from `pipe init --template embedding`"
        )
    if kinds not in (_SUPPORTED[:2], _SUPPORTED):
        raise ConfigError(f"{folder / 'modules.json'}: needs the modules Transformer, Pooling and, if any, Normalize")
    transformer, pooling = (folder / _inside(folder, str(module.get("path", ""))) for module in modules[:2])
    _check_prompt(folder)
    facts = {
        "folder": str(folder),
        **_transformer_facts(transformer),
        "pooling": _pooling_modes(pooling / "config.json"),
        "normalizes": kinds == _SUPPORTED,
    }
    return transformer, facts


def _inside(folder: Path, path: str) -> str:
    if not (folder / path).resolve().is_relative_to(folder.resolve()):
        raise ConfigError(f"{folder / 'modules.json'}: the path {path!r} is outside the folder")
    return path


def _transformer_facts(folder: Path) -> dict[str, Any]:
    config, settings = _read(folder / "config.json"), _read(folder / _SETTINGS)
    if (kind := config.get("model_type")) in _DECODERS:
        raise ConfigError(f"{folder / 'config.json'}: the model type {kind} is not supported; use an encoder as BERT")
    length, tokenizer = settings.get("max_seq_length"), folder / "tokenizer_config.json"
    if length is None and tokenizer.is_file():  # as releases since 6 write it
        length = _read(tokenizer).get("model_max_length")
    if not isinstance(length, int) or not 3 <= length <= _LONGEST:
        raise ConfigError(f"{folder / _SETTINGS}: set max_seq_length to the most tokens of a text, found {length!r}")
    if not (folder / "tokenizer.json").is_file():
        raise ConfigError(
            f"{folder}: has no tokenizer.json; to fix it: load it with transformers' AutoTokenizer and save it there"
        )
    return {
        "longest": length,
        "lowercase": bool(settings.get("do_lower_case")),
        "padding": config.get("pad_token_id") or 0,
        "dimensions": config.get("matryoshka_dimensions") or [],
    }


def _pooling_modes(path: Path) -> list[str]:
    """Return the modes of pooling in the order in which their vectors are joined."""
    config = _read(path)
    if "pooling_mode" in config:
        modes = config["pooling_mode"] if isinstance(config["pooling_mode"], list) else [config["pooling_mode"]]
    else:
        names = [name for name, value in config.items() if name.startswith("pooling_mode_") and value]
        modes = [re.sub(r"^pooling_mode_|(?<!len)_tokens?$", "", name) for name in names]
        modes.sort(key=lambda mode: _POOLING.index(mode) if mode in _POOLING else -1)
    if not modes or any(mode not in _POOLING for mode in modes):
        raise ConfigError(f"{path}: pooling {', '.join(map(str, modes)) or 'of no kind'} is not supported; supported are {', '.join(_POOLING)}")  # fmt: skip  # noqa: E501
    return modes


def _check_prompt(folder: Path) -> None:
    path = folder / "config_sentence_transformers.json"
    if path.is_file() and (prompt := _read(path).get("default_prompt_name")):
        raise ConfigError(
            f"{path}: the default prompt {prompt!r} is not supported; remove it, and send it in the texts"
        )


def _read(path: Path) -> Any:
    if not path.is_file():
        raise ConfigError(f"{path}: no such file, which a sentence-transformers folder has")
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:
        raise ConfigError(f"{path}: not valid JSON: {error}") from error
