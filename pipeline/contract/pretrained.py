"""A folder of pretrained weights: where it is, which of its files are read, and that none leads out of it.

Finding the folder of pretrained weights: a folder, a project's run, or the Hugging Face hub's cache.

The run of another project whose trained weights are begun with: the newest that its own gate let pass.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.contract.errors import ConfigError, DataError, ResourceError
from pipeline.contract.run import Run, all_runs
from pipeline.contract.settings.stages import Model

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


_PASSED = ("pass", "no-baseline")  # every rule held; `forced` is somebody's word, and such a run is named by itself


def is_project(folder: Path) -> bool:
    return (folder / "pipe.yaml").is_file()


def run_of(project: Path, word: str, taken: str = "") -> Run:
    """The run that prepare has taken, while it is there, and else the newest that is good.

    Whether another run has the very weights that prepare has seen, their digests tell.
    """
    runs = project / "runs"
    if taken and (runs / taken / "run.json").is_file():
        return Run(runs / taken)
    states = {run: _lacks(run) for run in all_runs(runs)}
    good = next((run for run, lacks in states.items() if not lacks), None)
    if good is None:
        raise ConfigError(f"model.pretrained={word}: {_told(states)}; first `cd {word} && pipe run all`")
    return good


def check_trained(run: Run, digest: str) -> None:
    """The weights are those that training has left and the gate has seen."""
    record = run.read().steps.get("train")
    if record is not None and record.outputs.get(SINGLE) != digest:
        raise DataError(
            f"{run.output('train') / SINGLE}: changed since it was trained; `pipe verify {run.id}` there says more"
        )


def _lacks(run: Run) -> str:
    """What keeps a run from being begun with; empty where nothing does."""
    steps = run.read().steps
    for name in ("prepare", "train", "evaluate"):
        status = steps[name].status if name in steps else "never run"
        if status != "done":
            return f"{name} {status}"
    try:
        verdict = run.verdict()["verdict"]
    except (OSError, json.JSONDecodeError, KeyError) as error:
        raise DataError(f"{run.output('evaluate') / 'verdict.json'}: damaged or gone ({error})") from error
    return "" if verdict in _PASSED else f"verdict {verdict}"


def _told(states: dict[Run, str]) -> str:
    if not states:
        return "a project without runs, so there are no weights to begin with"
    newest, lacks = next(iter(states.items()))
    return f"none of its {len(states)} runs is trained and passed its gate (the newest, {newest.id}: {lacks})"
