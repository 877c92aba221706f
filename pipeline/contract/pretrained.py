"""Pretrained weights: find their folder, and choose the files that are read from it.

`model.pretrained` names a folder, a file of weights, another project (then its newest run that passed its gate is
used), or an id of the Hugging Face hub, whose files are in the hub's cache. No file outside the folder is ever read.
"""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.contract.config import Config
from pipeline.contract.run import Run, all_runs
from pipeline.contract.settings.stages import Model
from pipeline.contract.task import HasFiles, Task, make_shared_files
from pipeline.system.errors import ConfigError, DataError, PipelineError, ResourceError
from pipeline.system.files import digest_file, digest_mapping, write_atomic, write_json

SMALL_FILES = (
    *("config.json", "generation_config.json", "tokenizer*.json"),
    *("special_tokens_map.json", "chat_template.jinja"),
    *("vocab.json", "vocab.txt", "merges.txt", "*.model"),  # tokenizers without tokenizer.json
    *("preprocessor_config.json", "processor_config.json"),  # pictures and sound
    *("modules.json", "1_Pooling/config.json"),  # sentence-transformers
)
WEIGHT_INDEX, WEIGHT_FILE = "model.safetensors.index.json", "model.safetensors"
PRETRAINED_RECORD = "pretrained.json"  # written by prepare
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


@dataclass(frozen=True)
class Pretrained:
    """The files that are read from a folder, by their names in it."""

    folder: Path
    small: dict[str, Path]
    weights: dict[str, Path]

    @property
    def files(self) -> dict[str, Path]:
        return {**self.small, **self.weights}

    @property
    def is_run(self) -> bool:
        """Whether the folder is a run, and not one laid out as on the hub."""
        return bool(self.small) and (self.folder / "run.json").is_file()

    def config(self) -> dict[str, Any]:
        if (path := self.small.get("config.json")) is None:  # a single file, whose model the task builds
            return {}
        config = _read_json(path)
        if not isinstance(config, dict):
            raise DataError(f"{path}: must hold a mapping, found {type(config).__name__}")
        return config


def open_pretrained(folder: Path) -> Pretrained:
    """Open a folder laid out as on the hub, a run, whose trained weights are then the pretrained ones, or one file."""
    if folder.suffix == ".safetensors":
        if not folder.is_file():
            raise ConfigError(f"model.pretrained: no file {folder}")
        return Pretrained(folder.parent, {}, {folder.name: folder})
    if not folder.is_dir():
        raise ConfigError(f"model.pretrained: no folder {folder}; it must hold config.json and {WEIGHT_FILE}")
    own_run = (folder / "run.json").is_file()
    small_folder = folder / "prepare" / "files" if own_run else folder
    weights_folder = folder / "train" if own_run else folder
    small_files = {
        path.relative_to(small_folder).as_posix(): path
        for pattern in SMALL_FILES
        for path in sorted(small_folder.glob(pattern))
        if path.is_file()
    }
    if "config.json" not in small_files and (small_folder / "adapter_config.json").is_file():
        raise ConfigError(
            f"model.pretrained: {folder} holds an adapter, not a whole model; to fix it: name its base model, or merge "
            "the two with peft's merge_and_unload() and save_pretrained()"
        )
    if "config.json" not in small_files:
        raise ConfigError(f"model.pretrained: no config.json in {small_folder}, which describes the model")
    names = _weight_names(weights_folder)
    pretrained = Pretrained(folder, small_files, {name: weights_folder / name for name in names})
    for name, path in pretrained.files.items():
        _refuse_escape(name, path, small_folder if name in small_files else weights_folder)
    if not isinstance(pretrained.config().get("model_type"), str):
        raise ConfigError(
            f"{small_files['config.json']}: has no model_type, so it does not describe a model of transformers"
        )
    return pretrained


def _weight_names(folder: Path) -> list[str]:
    if (folder / WEIGHT_INDEX).is_file():
        return sorted(_files_in_index(folder))
    if (folder / WEIGHT_FILE).is_file():
        return [WEIGHT_FILE]
    if pickles := sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern)):
        raise ConfigError(
            f"{folder / pickles[0]}: a pickle, which can run code when it is read, and there is no {WEIGHT_FILE}; "
            "where you trust it, convert it once: "
            f'python -c "import torch; from safetensors.torch import save_file; save_file({{k: v.clone() for k, v in '
            f"torch.load('{pickles[0]}', weights_only=True).items()}}, '{WEIGHT_FILE}')\""
        )
    raise ConfigError(f"model.pretrained: neither {WEIGHT_FILE} nor {WEIGHT_INDEX} in {folder}")


def _files_in_index(folder: Path) -> set[str]:
    """Return the files that an index names, all in its folder."""
    index = folder / WEIGHT_INDEX
    body = _read_json(index)
    files = body.get("weight_map") if isinstance(body, dict) else None
    if not isinstance(files, dict) or not files or not all(isinstance(name, str) for name in files.values()):
        raise DataError(f"{index}: needs a `weight_map` from names of weights to names of files")
    counts = Counter(files.values())
    for name in counts:
        if Path(name).is_absolute() or ".." in Path(name).parts or Path(name).suffix != ".safetensors":
            raise DataError(f"{index}: names {name!r}, which is no safetensors file inside the folder")
    if absent := sorted(name for name in counts if not (folder / name).is_file()):
        first = next(weight for weight, name in files.items() if name == absent[0])
        others = f"; also missing: {', '.join(absent[1:])}" if absent[1:] else ""
        raise DataError(
            f"{index}: {absent[0]} is missing, which has {first} and {counts[absent[0]] - 1} more weights{others}; "
            "to fix it: fetch the missing files again"
        )
    return set(counts)


def _refuse_escape(name: str, path: Path, folder: Path) -> None:
    """Refuse a link out of the folder; the hub's own cache is made of links and allowed."""
    target = path.resolve()
    if not any(target.is_relative_to(allowed) for allowed in _allowed_folders(folder)):
        raise DataError(f"{path}: a link to {target}, outside the folder; to fix it: replace it by a copy of {name}")


def _allowed_folders(folder: Path) -> Iterator[Path]:
    """Yield the folders that links may lead to.

    In the hub's cache `models--NAME/snapshots/COMMIT/FILE` is a link to `models--NAME/blobs/DIGEST`.
    """
    folder = folder.resolve()
    yield folder
    if folder.parent.name == "snapshots" and folder.parents[1].name.startswith("models--"):
        yield folder.parents[1] / "blobs"


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:
        raise DataError(f"{path}: not valid JSON: {error}") from error


_HUB_ID = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([\w./-]+))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")


def hub_id(model: Model, root: Path) -> tuple[str, str]:
    """Return the hub id that `model.pretrained` names, and its revision; both are empty if it names a folder."""
    match = _HUB_ID.fullmatch(model.pretrained)
    return (match[1], match[2] or "") if match and not (root / model.pretrained).exists() else ("", "")


def locate_pretrained(model: Model, root: Path, commit: str = "", files: Iterable[str] = (), run: str = "") -> Path:
    """Return the folder; with a commit or a run, the one that prepare recorded.

    A commit is fetched again if one of `files` is not in the cache. For a project the folder is that of a run.
    """
    identifier, revision = hub_id(model, root)
    if not identifier:
        folder = root / Path(model.pretrained).expanduser()
        is_project = (folder / "pipe.yaml").is_file()
        return choose_run(folder, model.pretrained, run).path if is_project else folder
    if commit:
        cached = _fetch(identifier, commit, local=True)
        if cached and all((cached / name).is_file() for name in files):
            return cached
    fetched = _fetch(identifier, commit or revision, local=False)
    assert fetched is not None
    return fetched


def locate_fetched(model: Model, root: Path) -> Path | None:
    """Return the folder without fetching it; None if the hub's cache does not have it."""
    identifier, revision = hub_id(model, root)
    return _fetch(identifier, revision, local=True) if identifier else locate_pretrained(model, root)


def copy_small_files(pretrained: Pretrained, folder: Path) -> None:
    for name, path in pretrained.small.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, folder / name)


def planned_files(task: Task, config: Config, root: Path, prepared: Path | None, folder: Path) -> Path:
    """Return the shared files that the task has loaded, made in `folder` where no prepare step is reused."""
    if prepared is not None:
        if isinstance(task, HasFiles):
            task.use_files(prepared)
        return prepared
    if config.model.pretrained:
        if (fetched := locate_fetched(config.model, root)) is None:
            raise ResourceError(f"{config.model.pretrained} has not been fetched")
        copy_small_files(open_pretrained(fetched), folder)
    make_shared_files(task, folder)
    return folder


def commit_of(folder: Path) -> str:
    """Return the commit of a folder in the hub's cache; empty for any other folder."""
    return folder.name if _COMMIT.fullmatch(folder.name) and folder.parent.name == "snapshots" else ""


def _fetch(identifier: str, revision: str, local: bool) -> Path | None:
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ResourceError(
            f"model.pretrained={identifier}: no such folder, and `huggingface_hub`, which fetches it, is not "
            "installed; to fix it: `pip install pipe-road[deepseek]`"
        ) from None
    patterns = [*SMALL_FILES, WEIGHT_INDEX, "*.safetensors"]
    try:
        folder = snapshot_download(
            identifier,
            revision=revision or None,
            allow_patterns=patterns,
            ignore_patterns=["[!1]*/*", "1*/*.safetensors", "1*/*.model"],
            local_files_only=local,
        )
    except (OSError, ValueError) as error:
        if local:
            return None
        reason = " ".join(str(error).split())[:300]
        raise ResourceError(
            f"model.pretrained={identifier}: no such folder in the project, and Hugging Face has no "
            f"{revision or 'files'} of it ({reason}); to fix it without network access: copy config.json, the "
            "tokenizer and the safetensors files into a folder, and name it in model.pretrained"
        ) from error
    return Path(folder)


_PASSED = ("pass", "no-baseline")  # an overridden run must be named by its folder


def choose_run(project: Path, name: str, recorded: str = "") -> Run:
    """Return the run that prepare recorded, while it exists, or else the newest one that passed its gate.

    Digests are compared later, so another run is refused unless it has the same weights.
    """
    runs = project / "runs"
    if recorded and not Run(runs / recorded).problem:
        return Run(runs / recorded)
    problems = {run: _problem(run) for run in all_runs(runs)}
    usable = next((run for run, problem in problems.items() if not problem), None)
    if usable is None:
        raise ConfigError(
            f"model.pretrained={name}: {_explain(problems)}; to fix it: `cd {name} && pipe run all` first"
        )
    return usable


def check_trained(run: Run, digest: str) -> None:
    """Raise an error if the weights are not those that were trained and evaluated."""
    record = run.read().steps.get("train")
    if record is not None and record.outputs.get(WEIGHT_FILE) != digest:
        raise DataError(
            f"{run.output('train') / WEIGHT_FILE}: changed since it was trained; "
            f"run `pipe verify {run.id}` there for details"
        )


def _problem(run: Run) -> str:
    """Return why the weights of a run cannot be used; empty if they can."""
    if problem := run.problem:
        return problem
    steps = run.read().steps
    for name in ("prepare", "train", "evaluate"):
        status = steps[name].status if name in steps else "never run"
        if status != "done":
            return f"{name} {status}"
    try:
        verdict = run.verdict()["verdict"]
    except PipelineError as error:
        return str(error)
    return "" if verdict in _PASSED else f"verdict {verdict}"


def _explain(problems: dict[Run, str]) -> str:
    if not problems:
        return "the project has no runs, so there are no weights to start from"
    newest, problem = next(iter(problems.items()))
    return f"none of its {len(problems)} runs is trained and passed its gate (the newest, {newest.id}: {problem})"


PRETRAINED_KEY = "pretrained"  # in data.json
_DIGEST_CACHE = ".pretrained-digests.json"  # in the folder of runs


def record(pretrained: Pretrained, directory: Path) -> str:
    """Write the digests of all files that training reads; return the digest of them all."""
    digests = {name: digest_file(path) for name, path in pretrained.files.items()}
    run = Run(pretrained.folder.resolve()) if pretrained.is_run else None
    if run:
        check_trained(run, digests[WEIGHT_FILE])
    body = {
        "commit": commit_of(pretrained.folder),
        "run": run.id if run else "",
        "digest": digest_mapping(digests),
        "files": {
            name: {"sha256": digests[name], "bytes": path.stat().st_size} for name, path in pretrained.files.items()
        },
    }
    write_json(directory / PRETRAINED_RECORD, body)
    return str(body["digest"])


def find_pretrained(config: Config, root: Path) -> Pretrained | None:
    return open_pretrained(locate_pretrained(config.model, root)) if config.model.pretrained else None


def pretrained_parts(config: Config, root: Path, runs: Path) -> dict[str, str]:
    """Return the parts of prepare's key: the digests of a folder's files.

    Nothing for a hub id: prepare records the commit of its revision, and later steps use that one.
    """
    if not config.model.pretrained or any(hub_id(config.model, root)):
        return {}
    return _digests(open_pretrained(locate_pretrained(config.model, root)).files, runs / _DIGEST_CACHE)


def _digests(files: Mapping[str, Path], cache: Path) -> dict[str, str]:
    """Hash the files; weights may be large, so a file is read again only when its path, size or times have changed."""
    cached = _read_cache(cache)
    states = {name: _file_state(path) for name, path in files.items()}
    digests = {
        name: cached[states[name]] if states[name] in cached else digest_file(path) for name, path in files.items()
    }
    new_entries = {states[name]: digest for name, digest in digests.items()}
    if cache.parent.is_dir() and not new_entries.items() <= cached.items():
        write_atomic(cache, json.dumps({**cached, **new_entries}, indent=1, sort_keys=True))
    return digests


def _file_state(path: Path) -> str:
    """Describe a file by path, inode, size and times; unlike mtime, ctime cannot be set by hand."""
    path = path.resolve()
    status = path.stat()
    return f"{path} {status.st_dev}:{status.st_ino} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}"


def _read_cache(path: Path) -> dict[str, str]:
    if not path.is_file():
        return {}
    try:
        body: Any = json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError(f"{path}: damaged ({error}); to fix it: delete it, the digests are computed again") from error
    return dict(body)
