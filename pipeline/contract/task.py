"""What a user writes in `task.py`, and how it is loaded. Needs torch only where a task does.

Files that model, data and codec share, as a tokenizer: made once in prepare, named in data.json, checked by all.

The module a run trains, judges and exports: the task's own, or the one it makes of pretrained files.

Importing the user's `file.py:Class` without letting it shadow, or be shadowed by, anything.
"""

from __future__ import annotations

import importlib.util
import json
import stat
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

from pipeline.contract.errors import ConfigError, DataError
from pipeline.contract.files import digest_bytes, digest_tree
from pipeline.contract.run import Run

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.utils.data import Dataset

    from pipeline.contract.signature import Prompting

# Quoted, because they name torch, which only a task needs.
Batch: TypeAlias = "Mapping[str, Tensor]"
Outputs: TypeAlias = "Tensor | Mapping[str, Tensor]"
Columns: TypeAlias = Mapping[str, Any]
Split: TypeAlias = "Columns | Dataset[Mapping[str, Any]]"
Predictor: TypeAlias = "Callable[[Batch], Outputs]"


SPLITS = ("train", "validation", "test")


class Task(Protocol):
    """A model, its data, and what "good" means. Every tensor's first axis counts samples."""

    inputs: Sequence[str]  # batch columns handed to the model, in the order of forward()'s arguments
    outputs: Sequence[str]  # names of what the model returns

    def model(self) -> nn.Module: ...

    def data(self, split: str) -> Split:
        """`train`, `validation` or `test`: columns of equal length, or a map-style data set of mappings."""

    def loss(self, outputs: Outputs, batch: Batch) -> Tensor:
        """Mean over the samples of the batch."""

    def metrics(self, outputs: Outputs, batch: Batch) -> Mapping[str, Tensor]:
        """One value per sample for each metric, higher is better; their mean is the metric."""


@runtime_checkable
class HasBaseline(Protocol):
    def baseline(self) -> Predictor:
        """What the model must not be worse than, already fitted on the training split."""


@runtime_checkable
class HasExample(Protocol):
    def example(self) -> Sequence[Any]:
        """A few instances as a client would send them; they become golden requests."""


@runtime_checkable
class HasText(Protocol):
    def text(self, batch: Batch) -> Sequence[str]:
        """Each sample as a person would read it; the report shows those the model does worst on."""


@runtime_checkable
class HasFiles(Protocol):
    """Model, data and codec need the same files, as a tokenizer; they lie in the run, in `prepare/files/`."""

    def make_files(self, folder: Path) -> None:
        """Called once, in prepare: write them. Those of a pretrained model that are no weights are there already."""

    def use_files(self, folder: Path) -> None:
        """Called in every step right after the task is built; in prepare after they were made."""


@runtime_checkable
class HasPretrained(Protocol):
    def adapt(self, folder: Path) -> nn.Module:
        """The module that `model.pretrained` begins: by the folder's config.json, with head and frozen parts as wanted.

        It reads no weights: those of the folder are filled in by their names. It is called several times, and must
        build the same each time.
        """


@runtime_checkable
class HasAxes(Protocol):
    """Axes beside the batch that differ from request to request, as the length of a text."""

    # Input → names of its axes, the batch first: `{"input_ids": ("batch", "sequence")}`. One name is one size.
    axes: Mapping[str, Sequence[str]]
    longest: Mapping[str, int]  # how long each of them may be: `{"sequence": 512}`


@runtime_checkable
class Generates(Protocol):
    """A language model: its bundle holds a decoder with a cache, and the service answers prompts."""

    def language_model(self, model: nn.Module) -> nn.Module:
        """The causal model of `transformers` in what `model()` gave: itself, or a part of it."""

    def prompting(self) -> Prompting:
        """Ids that begin and end a text, and the chat template where there is one."""


@runtime_checkable
class HasParallelize(Protocol):
    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> Sequence[str] | None:
        """How the model is cut over the processes of `mesh`, whose one axis is called `tensor` or `pipeline`.

        For `tensor`, cut layers in place with torch's `parallelize_module`. For `pipeline`, change nothing and
        return the names of the modules at which the second and later stages begin.
        """


@runtime_checkable
class Classifier(Protocol):
    """Adds class balance, per-class metrics, the confusion matrix and the count of flipped answers."""

    classes: Sequence[str]

    def predicted(self, outputs: Outputs) -> Tensor:
        """Class index per sample."""

    def actual(self, batch: Batch) -> Tensor:
        """True class index per sample."""


@runtime_checkable
class Regressor(Protocol):
    """A task without `classes` that has these two adds mae, rmse, r2 and spearman."""

    def predicted(self, outputs: Outputs) -> Tensor:
        """A number per sample."""

    def actual(self, batch: Batch) -> Tensor:
        """The true number per sample."""


@runtime_checkable
class Ranker(Protocol):
    """A sample is one item of a query's list; adds ndcg, mrr and auc, each a mean over queries."""

    def predicted(self, outputs: Outputs) -> Tensor:
        """A score per sample, the greater the further up in its list."""

    def actual(self, batch: Batch) -> Tensor:
        """How relevant each sample is: 0 is not at all."""

    def queries(self, batch: Batch) -> Tensor:
        """The whole number of the query each sample belongs to."""


@runtime_checkable
class HasProbabilities(Protocol):
    """Adds the calibration of a classifier, its Brier score and its auc."""

    def probabilities(self, outputs: Outputs) -> Tensor:
        """[samples, classes]: rows between 0 and 1 that add up to 1."""


@runtime_checkable
class HasSlices(Protocol):
    def slices(self, batch: Batch) -> Mapping[str, Sequence[str]]:
        """Groups that must not get worse unseen: a label per sample under each name; "" for a sample in none."""


def load_task(reference: str, root: Path) -> Task:
    """Import and build the task, and say which required part is missing."""
    kind = load_class(reference, root)
    try:
        task: Task = kind()
    except TypeError as error:
        raise ConfigError(f"{reference}: cannot be built without arguments ({error})") from error
    for method, signature in _METHODS.items():
        if not callable(getattr(task, method, None)):
            raise ConfigError(f"{reference}: has no method {signature}; every task needs it")
    for attribute in ("inputs", "outputs"):
        if not _are_names(getattr(task, attribute, None)):
            raise ConfigError(f'{reference}: set `{attribute} = ("name", ...)`, the names of the model\'s {attribute}')
    pair = [name for name in ("make_files", "use_files") if callable(getattr(task, name, None))]
    if len(pair) == 1:
        other = "use_files" if pair == ["make_files"] else "make_files"
        raise ConfigError(f"{reference}: has {pair[0]}(folder) without {other}(folder); a task needs both or neither")
    return task


def _are_names(value: object) -> bool:
    """At least one, each a word of its own."""
    if not isinstance(value, list | tuple) or not value:
        return False
    return all(isinstance(name, str) and name for name in value) and len(set(value)) == len(value)


_METHODS = {
    "model": "model()",
    "data": "data(split)",
    "loss": "loss(outputs, batch)",
    "metrics": "metrics(outputs, batch)",
}


FOLDER = "files"  # of the prepare step's output
KEY = "files"  # in data.json, whose own digest is part of every later step's key and of the bundle's lineage


def make_companions(task: Task, folder: Path) -> None:
    """In prepare: what the task makes joins what lies there already, and the task goes on with it."""
    if isinstance(task, HasFiles):
        folder.mkdir(parents=True, exist_ok=True)
        task.make_files(folder)
        _check_plain(folder)
        task.use_files(folder)


def companions_in(folder: Path) -> dict[str, str]:
    """What data.json is to say of them: digest by path below the folder."""
    return digest_tree(folder) if folder.is_dir() else {}


def open_task(run: Run, root: Path) -> Task:
    """The task as every step after prepare works with it."""
    task = load_task(run.config.task, root)
    if isinstance(task, HasFiles):
        task.use_files(companions_of(run))
    return task


def companions_of(run: Run) -> Path:
    """The folder, every file of it as prepare left it."""
    folder, report = run.output("prepare") / FOLDER, run.output("prepare") / "data.json"
    if not report.is_file():
        raise DataError(f"{report}: not there, so nothing says which files the task shares; run the prepare step first")
    recorded: Mapping[str, Any] = json.loads(report.read_text()).get(KEY, {})
    found = companions_in(folder)
    if changed := sorted(name for name in recorded.keys() | found.keys() if recorded.get(name) != found.get(name)):
        raise DataError(f"{folder / changed[0]}: not as prepare left it; `pipe run all` makes it again")
    return folder


def _check_plain(folder: Path) -> None:
    """A link's target would be neither digested nor there in a pod."""
    for path in sorted(folder.rglob("*")):
        mode = path.lstat().st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            raise DataError(f"make_files() left {path.relative_to(folder)}, which is no plain file; write a copy of it")


def build_model(task: Task, run: Run) -> nn.Module:
    """Its weights are still to be filled in; in every step it is built of the files that prepare has kept."""
    if not run.config.model.pretrained:
        return task.model()
    return adapting(task, run.config.task).adapt(companions_of(run))


def adapting(task: Task, reference: str) -> HasPretrained:
    if not isinstance(task, HasPretrained):
        raise ConfigError(
            f"{reference}: has no method adapt(folder), which builds the model that model.pretrained begins; "
            "write it, or leave model.pretrained out"
        )
    return task


def load_class(reference: str, root: Path, alias: str = "") -> Any:
    """The class a reference names; files beside it are importable, after everything installed.

    An alias names the module where one process loads several files of one name: by their content.
    """
    file, _, name = reference.partition(":")
    path = (root / file).resolve()
    if not path.is_file():
        raise ConfigError(f"{reference}: no file {file} in {root}")
    module = _execute(path, alias) if alias else _load(path, root.resolve())
    if not hasattr(module, name):
        raise ConfigError(f"{reference}: {file} has no class {name}")
    return getattr(module, name)


def _load(path: Path, root: Path) -> Any:
    for folder in (str(root), str(path.parent)):
        if folder not in sys.path:
            sys.path.append(folder)  # last: a user's train.py must not shadow ours
    name = path.stem
    loaded = sys.modules.get(name)
    if loaded is not None and getattr(loaded, "__file__", None) == str(path):
        return loaded
    if loaded is not None or _taken(name, path):
        name = f"_{name}_{digest_bytes(str(path).encode())[:12]}"  # the plain name belongs to somebody else
        if name in sys.modules:
            return sys.modules[name]
    return _execute(path, name)


def _execute(path: Path, name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # a script without a main guard must not end the step as if it were done
        del sys.modules[name]
        text = " ".join(str(error).split())
        raise ConfigError(f"{path.name}: import failed: {type(error).__name__}: {text}") from error
    return module


def _taken(name: str, path: Path) -> bool:
    """Whether `import name` means something else than this file, though nobody imported it yet."""
    spec = importlib.util.find_spec(name)
    return spec is not None and spec.origin != str(path)
