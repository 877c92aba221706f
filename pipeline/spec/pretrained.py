"""A folder of pretrained weights: where it is, which of its files are read, and that none leads out of it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.spec.errors import ConfigError, DataError

SMALL = ("config.json", "generation_config.json", "tokenizer*.json", "special_tokens_map.json", "chat_template.jinja")
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
RECORD = "pretrained.json"  # what prepare writes of them
ARCHITECTURES = (
    "deepseek_v2",
    "deepseek_v3",
    "llama",
    "qwen2",
    "qwen3",
)  # each is tested against transformers' own loading
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


@dataclass(frozen=True)
class Pretrained:
    """What is read of a folder, by the names the files have in it."""

    folder: Path
    small: dict[str, Path]
    weights: dict[str, Path]

    @property
    def files(self) -> dict[str, Path]:
        return {**self.small, **self.weights}

    @property
    def of_run(self) -> bool:
        """Trained by us, and not as the hub has it."""
        return (self.folder / "run.json").is_file()

    def config(self) -> dict[str, Any]:
        return read_config(self.small["config.json"])


def open_pretrained(folder: Path) -> Pretrained:
    """A folder as the hub has it, or a run of ours, whose trained weights then are the pretrained ones."""
    if not folder.is_dir():
        raise ConfigError(f"model.pretrained: no folder {folder}; it must hold config.json and {SINGLE}")
    own_run = Pretrained(folder, {}, {}).of_run
    small_place = folder / "prepare" / "files" if own_run else folder
    weights_place = folder / "train" if own_run else folder
    small = {path.name: path for pattern in SMALL for path in sorted(small_place.glob(pattern)) if path.is_file()}
    if "config.json" not in small:
        raise ConfigError(f"model.pretrained: no config.json in {small_place}, which says what the model is")
    names = _weight_names(weights_place)
    found = Pretrained(folder, small, {name: weights_place / name for name in names})
    for name, path in found.files.items():
        _refuse_escape(name, path, small_place if name in small else weights_place)
    _refuse_unknown(found)
    return found


def read_config(path: Path) -> dict[str, Any]:
    config = _read_json(path)
    if not isinstance(config, dict):
        raise DataError(f"{path}: must hold a mapping, found {type(config).__name__}")
    return config


def _refuse_unknown(found: Pretrained) -> None:
    config = found.config()
    if config.get("model_type") not in ARCHITECTURES:
        named = config.get("architectures") or ["nothing"]
        raise ConfigError(
            f"{found.small['config.json']}: model_type {config.get('model_type')!r} (architectures: "
            f"{', '.join(map(str, named))}) is none that pretrained weights are read for: {', '.join(ARCHITECTURES)}"
        )


def _weight_names(place: Path) -> list[str]:
    if (place / INDEX).is_file():
        return sorted(_indexed(place))
    if (place / SINGLE).is_file():
        return [SINGLE]
    if pickles := sorted(path.name for pattern in _PICKLES for path in place.glob(pattern)):
        raise ConfigError(
            f"{place / pickles[0]}: a pickle, which can run code when it is read, and there is no {SINGLE}; "
            "where you trust it, convert it once: "
            f'python -c "import torch; from safetensors.torch import save_file; save_file({{k: v.clone() for k, v in '
            f"torch.load('{pickles[0]}', weights_only=True).items()}}, '{SINGLE}')\""
        )
    raise ConfigError(f"model.pretrained: neither {SINGLE} nor {INDEX} in {place}")


def _indexed(place: Path) -> set[str]:
    """The shards an index names, each a file beside it."""
    index = place / INDEX
    body = _read_json(index)
    files = body.get("weight_map") if isinstance(body, dict) else None
    if not isinstance(files, dict) or not files or not all(isinstance(name, str) for name in files.values()):
        raise DataError(f"{index}: needs a `weight_map` from the names of weights to those of files")
    counts = Counter(files.values())
    for name in counts:
        if Path(name).is_absolute() or ".." in Path(name).parts or Path(name).suffix != ".safetensors":
            raise DataError(f"{index}: names {name!r}, which is no safetensors file inside the folder; it is not read")
    if absent := sorted(name for name in counts if not (place / name).is_file()):
        first = next(weight for weight, name in files.items() if name == absent[0])
        more = f", and {', '.join(absent[1:])} are not there either" if absent[1:] else ""
        raise DataError(
            f"{index}: {absent[0]} is not in the folder, and holds {first} and {counts[absent[0]] - 1} more "
            f"weights{more}; fetch what is missing again"
        )
    return set(counts)


def _refuse_escape(name: str, path: Path, place: Path) -> None:
    """A link may lead to another file of the folder, or into the hub's own cache, which is made of links."""
    real = path.resolve()
    if not any(real.is_relative_to(inside) for inside in _inside(place)):
        raise DataError(f"{path}: a link to {real}, outside the folder; put a copy of {name} there instead")


def _inside(place: Path) -> Iterator[Path]:
    """Hub cache: `models--NAME/snapshots/COMMIT/FILE` is a link to `models--NAME/blobs/DIGEST`."""
    place = place.resolve()
    yield place
    if place.parent.name == "snapshots" and place.parents[1].name.startswith("models--"):
        yield place.parents[1] / "blobs"


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:
        raise DataError(f"{path}: not valid JSON: {error}") from error
