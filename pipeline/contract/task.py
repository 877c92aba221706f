"""The task protocol that a user implements in `task.py`, and loading of such classes and of their trained weights.

A task may share files, such as a tokenizer, with its codec: prepare creates them and records their digests in
data.json, and every later step checks them. This module needs torch only if the task does.
"""

from __future__ import annotations

import copy
import difflib
import inspect
import itertools
import stat
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, runtime_checkable

from pipeline.contract.run import Run, describe
from pipeline.system.errors import ConfigError, DataError, StageError
from pipeline.system.files import digest_tree, read_object
from pipeline.system.imports import PROJECT, import_file
from pipeline.system.torchvision_operators import declare_torchvision_operators

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim import Optimizer
    from torch.utils.data import Dataset

    from pipeline.contract.config import Config
    from pipeline.contract.settings.stages import Export, Train
    from pipeline.contract.signature import Prompting

# Quoted, because they name torch, which only a task needs.
Batch: TypeAlias = "Mapping[str, Tensor]"
Outputs: TypeAlias = "Tensor | Mapping[str, Tensor]"
Columns: TypeAlias = Mapping[str, Any]
Split: TypeAlias = "Columns | Dataset[Mapping[str, Any]] | MapStyle | Iterable[Any]"
Predictor: TypeAlias = "Callable[[Batch], Outputs]"


class MapStyle(Protocol):
    """A data set with a length and samples by index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


SPLITS = ("train", "validation", "test")
BATCH = "batch"  # the name of the first axis of every tensor


class Task(Protocol):
    """A model, its data, loss and metrics. The first axis of every tensor is the batch."""

    inputs: Sequence[str]  # batch columns handed to the model, in the order of forward()'s arguments
    outputs: Sequence[str]  # names of what the model returns

    def model(self) -> nn.Module: ...

    def data(self, split: str) -> Split:
        """Return a split (`train`, `validation`, `test`): columns of equal length, a map-style data set or a stream.

        Where nothing is trained, only `test` is read, and loss() is not needed.
        """

    def loss(self, outputs: Outputs, batch: Batch) -> Tensor:
        """Return the mean over the batch: over its samples, or what `loss_weight` counts."""

    def metrics(self, outputs: Outputs, batch: Batch) -> Mapping[str, Tensor]:
        """Return one value per sample for each metric; higher is better, unless `directions` declares otherwise.

        A task without it, which trains nothing, has no labelled data, and is not evaluated.
        """


@runtime_checkable
class HasReference(Protocol):
    def reference(self, instances: Sequence[Any], model: nn.Module) -> Sequence[Any]:
        """Return what the model's own library answers; the bundle's codec and file must answer the same.

        `instances` are those of example(), and the answers have the form of encode().
        """


@runtime_checkable
class HasCollate(Protocol):
    def collate(self, samples: Sequence[Mapping[str, Any]]) -> Batch:
        """Return samples as one batch: each column a tensor with one row per sample, such as texts that are padded."""


@runtime_checkable
class HasLossWeight(Protocol):
    def loss_weight(self, batch: Batch) -> Tensor | float:
        """Return what the batch counts for in a mean of losses, such as its number of answer tokens; default: samples.

        Slices of a batch are combined by it, so that loss() is the mean over the whole global batch. Where it is 0,
        loss() must be finite.
        """


@runtime_checkable
class HasOptimizer(Protocol):
    def optimizer(self, model: nn.Module, settings: Train) -> Optimizer:
        """Return an optimizer of all trained parameters; `settings` are those of the section train.

        The schedule multiplies the learning rate of each group: it is the peak.
        """


@runtime_checkable
class HasSampleWeights(Protocol):
    def sample_weights(self, data: Split) -> Sequence[float]:
        """Return a weight for each sample of `data("train")`: an epoch draws as many, with replacement."""


@runtime_checkable
class HasSampleGroups(Protocol):
    def sample_groups(self, data: Split) -> Sequence[int]:
        """Return the integer id of each sample's group, such as its query; training and validation divide no group."""


@runtime_checkable
class HasSampleLengths(Protocol):
    def sample_lengths(self, data: Split) -> Sequence[int]:
        """Return the length of each sample; a batch has samples of similar lengths."""


@runtime_checkable
class HasBaseline(Protocol):
    def baseline(self) -> Predictor:
        """Return a predictor that the model is compared with, fitted on the training split."""


@runtime_checkable
class HasExample(Protocol):
    def example(self) -> Sequence[Any]:
        """Return a few instances as a client would send them; they become golden requests."""


@runtime_checkable
class HasInstances(Protocol):
    def instances(self, batch: Batch) -> Sequence[Any]:
        """Return these samples as a client would send them; decode() must make the batch's columns of them.

        None stands for a sample that no client can send, such as a text that was cut. An instance for a language model
        may be a part of the sample.
        """


@runtime_checkable
class HasAnswer(Protocol):
    def answer(self, prediction: Any) -> Any:
        """Return what predicted() returns for the sample, read from a prediction of encode().

        It is a class by name or index, a number, or a list of numbers, which may lack padding.
        """


@runtime_checkable
class HasPredicted(Protocol):
    def predicted(self, outputs: Outputs) -> Tensor:
        """Return what the model predicts for each sample."""


@runtime_checkable
class HasText(Protocol):
    def text(self, batch: Batch) -> Sequence[str]:
        """Return each sample as readable text; the report shows the worst samples."""


@runtime_checkable
class HasShow(Protocol):
    def show(self, batch: Batch, outputs: Outputs) -> Sequence[Mapping[str, Any]]:
        """Return for each sample what the report displays of it, by name, such as input, answer and target.

        A value is a text, a number, a mapping (a row of a table by column), an array or tensor with one axis (a curve)
        or of the shape of a picture, or a `pipeline.TaggedText`, `Boxes` or `Embedding`.
        """


# Values of a sample that `show` may return besides plain ones.


@dataclass(frozen=True)
class TaggedText:
    """A text with a tag for each word; "" and "O" are no tag."""

    words: Sequence[str]
    tags: Sequence[str]

    def __post_init__(self) -> None:
        if len(self.words) != len(self.tags):
            raise DataError(f"TaggedText: needs one tag for each of its {len(self.words)} words, not {len(self.tags)}")


@dataclass(frozen=True)
class Boxes:
    """A picture with boxes drawn on it."""

    picture: Any  # rows × columns, with or without an axis of 1 or 3 channels
    boxes: Any  # one row (left, top, right, bottom) for each box, in pixels of the picture
    labels: Sequence[str] = ()
    scores: Sequence[float] = ()

    def __post_init__(self) -> None:
        for name, values in (("labels", self.labels), ("scores", self.scores)):
            if len(values) not in (0, len(self.boxes)):
                raise DataError(f"Boxes: has {len(self.boxes)} boxes and {len(values)} {name}; give one for each box")


@dataclass(frozen=True)
class Embedding:
    """A vector that is displayed as the texts of the nearest other vectors of the test set, by cosine similarity."""

    vector: Any
    text: str
    among: str = ""  # name under which the vectors to search are shown, such as "document"; empty: the same name


@runtime_checkable
class HasFiles(Protocol):
    """A task whose model, data and codec share files, such as a tokenizer; they are in `prepare/files/` of the run."""

    def make_files(self, folder: Path) -> None:
        """Write the files; called in check and in prepare. A pretrained model's other files exist there already."""

    def use_files(self, folder: Path) -> None:
        """Load the files; called in every step, right after the task is created or `make_files` was called."""


@runtime_checkable
class HasPretrained(Protocol):
    def adapt(self, folder: Path) -> nn.Module:
        """Build the module by the folder's config.json, with the head and the frozen parts of this task.

        The weights of the folder are loaded by name afterwards. It is called several times and must build the same
        module each time.
        """


@runtime_checkable
class HasAxes(Protocol):
    """A task with dynamic axes besides the batch, such as the length of a text."""

    # Input → its axes, the batch first: `{"input_ids": ("batch", "sequence")}`. Equal names are equal sizes;
    # numbers, and axes left out at the end, are fixed. Outputs may be named as well: the export checks their axes.
    axes: Mapping[str, Sequence[str | int]]
    # The maximum size of each name of an input: `{"sequence": 512}`. A task may have their minimum sizes as `shortest`.
    longest: Mapping[str, int]


@runtime_checkable
class HasServing(Protocol):
    """A task whose model is served in another form than it is trained, such as a decoder that generates a text.

    Only loss() gets what the model returns in training; what is served is evaluated, exported and compared.
    """

    serving_inputs: Sequence[str]  # as `inputs`, of the served form; batches have these columns too
    serving_outputs: Sequence[str]

    def export_model(self, model: nn.Module) -> nn.Module:
        """Return the module that is served, which contains `model` or parts of it."""


@runtime_checkable
class Generates(Protocol):
    """A language model: its bundle contains a decoder with a cache, and the service completes prompts."""

    def language_model(self, model: nn.Module) -> nn.Module:
        """Return the causal model of `transformers` in the result of `model()`: itself, or a part of it."""

    def prompting(self) -> Prompting:
        """Return the ids that begin and end a text, and the chat template, if any."""


@runtime_checkable
class HasParallelize(Protocol):
    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> Sequence[str] | None:
        """Split the model over the processes of `mesh`, whose only axis is called `tensor` or `pipeline`.

        For `tensor`, split layers in place with torch's `parallelize_module`. For `pipeline`, change nothing and
        return the names of the modules at which the second and later stages begin.
        """


@runtime_checkable
class Classifier(Protocol):
    """A classifier: adds class balance, per-class metrics, the confusion matrix and changed predictions."""

    classes: Sequence[str]

    def predicted(self, outputs: Outputs) -> Tensor:
        """Return the predicted class index per sample."""

    def actual(self, batch: Batch) -> Tensor:
        """Return the true class index per sample."""


@runtime_checkable
class Regressor(Protocol):
    """A regressor or forecast, which has no `classes`: adds mae, rmse, r2 and, without horizons, spearman."""

    def predicted(self, outputs: Outputs) -> Tensor:
        """Return the predicted number per sample, or one for each horizon."""

    def actual(self, batch: Batch) -> Tensor:
        """Return the true number per sample, or one for each horizon."""


@runtime_checkable
class Ranker(Protocol):
    """A ranker, whose samples are items of a query's list: adds ndcg, mrr and auc, each a mean over queries."""

    def predicted(self, outputs: Outputs) -> Tensor:
        """Return a score per sample; higher scores come first in the list."""

    def actual(self, batch: Batch) -> Tensor:
        """Return the relevance of each sample; 0 is irrelevant."""

    def queries(self, batch: Batch) -> Tensor:
        """Return the integer id of each sample's query."""


@runtime_checkable
class HasProbabilities(Protocol):
    """A classifier with probabilities: adds its calibration, Brier score and auc."""

    def probabilities(self, outputs: Outputs) -> Tensor:
        """Return [samples, classes]: values between 0 and 1 that add up to 1 per row."""


@runtime_checkable
class HasQuantiles(Protocol):
    """A forecast with quantiles: adds pinball and coverage_error."""

    quantiles: Sequence[float]  # rising levels between 0 and 1, as (0.1, 0.5, 0.9)

    def predicted_quantiles(self, outputs: Outputs) -> Tensor:
        """Return [samples, horizons, quantiles]."""


@runtime_checkable
class HasDirections(Protocol):
    """A task with metrics where lower is better."""

    # Metric of metrics() → which values are better: `{"word_error_rate": "lower"}`; higher for those not named.
    directions: Mapping[str, Literal["higher", "lower"]]


@runtime_checkable
class HasSlices(Protocol):
    def slices(self, batch: Batch) -> Mapping[str, Sequence[str]]:
        """Return groups that are evaluated separately: per name a label for each sample, "" for none."""


def is_evaluated(task: Task) -> bool:
    """Return whether the task has labelled data; only one that trains nothing may lack it."""
    return callable(getattr(task, "metrics", None))


def splits_to_read(config: Config) -> tuple[str, ...]:
    return SPLITS if config.trains else SPLITS[-1:]


def load_task(reference: str, root: Path, trains: bool = True) -> Task:
    """Import and create the task; an error names a missing method or attribute."""
    declare_torchvision_operators()
    kind = load_class(reference, root)
    try:
        task: Task = kind()
    except TypeError as error:
        raise ConfigError(f"{reference}: cannot be built without arguments ({error})") from error
    for method, signature in _METHODS.items() if trains else list(_METHODS.items())[:2]:
        if not callable(getattr(task, method, None)):
            who = "a task that trains" if trains else "every task"
            raise ConfigError(f"{reference}: has no method {signature}; {who} needs it")
    for attribute in ("inputs", "outputs"):
        if not _are_names(getattr(task, attribute, None)):
            raise ConfigError(f'{reference}: set `{attribute} = ("name", ...)`, the names of the model\'s {attribute}')
    _check_directions(reference, getattr(task, "directions", {}))
    _check_serving(reference, task)
    for form in (task, serving_form(task)):
        _check_names(reference, form)
    _check_axes(reference, serving_form(task))
    _check_quantiles(reference, task)
    methods = [name for name in ("make_files", "use_files") if callable(getattr(task, name, None))]
    if len(methods) == 1:
        other = "use_files" if methods == ["make_files"] else "make_files"
        raise ConfigError(
            f"{reference}: has {methods[0]}(folder) without {other}(folder); a task needs both or neither"
        )
    return task


def serving_form(task: Task) -> Task:
    """Return a task with the inputs and outputs of what is served."""
    if not isinstance(task, HasServing):
        return task
    form = copy.copy(task)
    form.inputs, form.outputs = task.serving_inputs, task.serving_outputs
    return form


def served_model(task: Task, model: nn.Module) -> nn.Module:
    from pipeline.contract.given import ExportedModel  # needs torch

    if isinstance(model, ExportedModel):
        return model.open()
    return task.export_model(model).eval() if isinstance(task, HasServing) else model


def _check_serving(reference: str, task: Task) -> None:
    names = ("export_model", "serving_inputs", "serving_outputs")
    if missing := [name for name in names if not hasattr(task, name)]:
        if len(missing) < len(names):
            raise ConfigError(f"{reference}: has no `{missing[0]}`; what is served needs {', '.join(names)}")
        return
    if isinstance(task, Generates):
        raise ConfigError(f"{reference}: export_model() is not for language models, whose decoder is exported as it is")
    for name in names[1:]:
        if not _are_names(getattr(task, name)):
            raise ConfigError(f'{reference}: set `{name} = ("name", ...)`, the names of what is served')


def misspelled_members(task: Task) -> str:
    """Return a warning if a public member of the task nearly has the name of an optional one, which it lacks."""
    others = _OPTIONAL_METHODS | _OPTIONAL_ATTRIBUTES | _METHODS.keys()
    for name in (name for name in dir(task) if not name.startswith("_") and name not in others):
        is_method = callable(inspect.getattr_static(task, name))
        absent = {
            name for name in (_OPTIONAL_METHODS if is_method else _OPTIONAL_ATTRIBUTES) if not hasattr(task, name)
        }
        if near := difflib.get_close_matches(name, absent, n=1, cutoff=_SIMILARITY):
            return f"pipe does not use `{name}` of the task; did you mean `{near[0]}`?"
    return ""


def _check_directions(reference: str, directions: object) -> None:
    if not isinstance(directions, Mapping) or not set(directions.values()) <= {"higher", "lower"}:
        raise ConfigError(
            f'{reference}: write `directions` as {{"metric": "lower"}}, with "higher" or "lower" for each'
        )


def _check_quantiles(reference: str, task: Task) -> None:
    if len(present := [name for name in ("quantiles", "predicted_quantiles") if hasattr(task, name)]) == 1:
        raise ConfigError(
            f"{reference}: has {present[0]}; a task needs `quantiles` and predicted_quantiles(), or neither"
        )
    levels = getattr(task, "quantiles", (0.5,))
    is_list = isinstance(levels, list | tuple) and levels and all(isinstance(level, float) for level in levels)
    if not is_list or not all(a < b for a, b in itertools.pairwise((0.0, *levels, 1.0))):
        raise ConfigError(f"{reference}: write `quantiles` as (0.1, 0.5, 0.9): rising numbers between 0 and 1")
    if present and (not isinstance(task, Regressor) or isinstance(task, Classifier | Ranker)):
        raise ConfigError(f"{reference}: `quantiles` are for forecasts: predicted() and actual() without `classes`")


def _are_names(value: object) -> bool:
    """Return whether it is a non-empty list of distinct printable texts."""
    if not isinstance(value, list | tuple) or not value:
        return False
    return all(isinstance(name, str) and name.strip() and name.isprintable() for name in value) and (
        len(set(value)) == len(value)
    )


def _check_names(reference: str, task: Task) -> None:
    if both := sorted(set(task.inputs) & set(task.outputs)):
        raise ConfigError(
            f"{reference}: `{both[0]}` is an input and an output, and in ONNX one name is one tensor; name the output "
            f"otherwise, as in `{both[0]}_out`"
        )


def check_export(task: Task, export: Export) -> None:
    """Reject settings that no export of this task can meet, before anything is trained."""
    if "savedmodel" in export.formats:
        _check_savedmodel_names(task)
    if "genai" in export.formats and not isinstance(task, Generates):
        raise ConfigError("export.formats: genai is for language models; leave it out")
    generates = isinstance(task, Generates)
    others = {"int8-dynamic", "int8-static"} if generates else {"int8", "int4", "int4-128", "int4-gptq"}
    if names := sorted(others.intersection(export.built_variants)):
        kind, fix = ("a language model", "int8 or int4") if generates else ("this model", "int8-dynamic or int8-static")
        raise ConfigError(f"export.variants: {', '.join(names)} is not for {kind}; use {fix}")
    if names := [name for name in export.built_variants if name != "fp32"] if not is_evaluated(task) else []:
        raise ConfigError(
            f"export.variants: {', '.join(names)} is judged on labelled data, which this task has not; leave it out, "
            "or write metrics(outputs, batch)"
        )
    if "perplexity" in export.budget and not generates:
        raise ConfigError("export.budget: perplexity is only known of language models; leave it out")


def _check_savedmodel_names(task: Task) -> None:
    """Check the names of inputs and outputs: TensorFlow takes only identifiers."""
    if wrong := [name for name in (*task.inputs, *task.outputs) if not (name.isascii() and name.isidentifier())]:
        raise ConfigError(
            f"export.formats: a SavedModel cannot have a tensor called `{wrong[0]}`; name it in the task with letters, "
            "digits and _ only, or leave savedmodel out"
        )


def _check_axes(reference: str, task: Task) -> None:
    if isinstance(task, HasAxes):
        declared_axes(task, reference)
        shortest: Any = getattr(task, "shortest", {})
        if not isinstance(shortest, Mapping) or not all(
            isinstance(size, int) and 0 < size < task.longest.get(axis, 0) for axis, size in shortest.items()
        ):
            raise ConfigError(
                f"{reference}: `shortest` must give names of `longest` a size from 1 to below their longest; found "
                f"{shortest}"
            )
    elif present := [name for name in ("axes", "longest", "shortest") if hasattr(task, name)]:
        missing = "longest" if "axes" in present else "axes"
        raise ConfigError(f"{reference}: has `{present[0]}` without `{missing}`; a task with dynamic axes needs both")


def declared_axes(task: HasAxes, reference: str = "task") -> dict[str, tuple[str | int, ...]]:
    """Return the axes of every input, and of the outputs for which the task names them; raise where they are wrong."""
    inputs: Sequence[str]
    inputs, outputs = getattr(task, "inputs", ()), getattr(task, "outputs", ())
    if not isinstance(task.axes, Mapping) or not isinstance(task.longest, Mapping):
        raise ConfigError(
            f'{reference}: write `axes` as {{"{inputs[0]}": ("{BATCH}", "time")}} and `longest` as {{"time": 512}}'
        )
    declared = {name: tuple(axes) for name, axes in task.axes.items()}
    if unknown := sorted(declared.keys() - {*inputs, *outputs}):
        raise ConfigError(
            f"{reference}: `axes` names {', '.join(unknown)}, which is no input of the task ({', '.join(inputs)}) and "
            f"no output ({', '.join(outputs)})"
        )
    for name, axes in declared.items():
        names = [axis for axis in axes if isinstance(axis, str)]
        repeated = name in inputs and len(set(names)) != len(names)
        if axes[:1] != (BATCH,) or not all(isinstance(axis, str | int) and axis for axis in axes) or repeated:
            raise ConfigError(
                f"{reference}: `axes` of {name}: write the names of its axes, `{BATCH}` first, and numbers for fixed "
                f"sizes; found {axes}"
            )
    by_input = {name: declared.get(name, (BATCH,)) for name in inputs}
    names_of_inputs = {axis for axes in by_input.values() for axis in axes[1:] if isinstance(axis, str)}
    if set(task.longest) != names_of_inputs:
        names_text = ", ".join(sorted(names_of_inputs)) or "no axis"
        raise ConfigError(
            f"{reference}: `longest` must give the maximum of each of {names_text}; found {dict(task.longest)}"
        )
    return by_input | {name: axes for name, axes in declared.items() if name in outputs}


def input_axes(task: Task) -> dict[str, tuple[str | int, ...]]:
    """Return every input's axes, the batch first; empty if only the batch is dynamic."""
    if not isinstance(task, HasAxes):
        return {}
    axes = declared_axes(task)
    return {name: axes[name] for name in task.inputs}


def max_axis_sizes(task: Task) -> dict[str, int]:
    return dict(task.longest) if isinstance(task, HasAxes) else {}


def shortest_sizes(task: Task) -> dict[str, int]:
    """Return the minimum size of each named axis besides the batch."""
    return {**dict.fromkeys(max_axis_sizes(task), 1), **getattr(task, "shortest", {})}


_SIMILARITY = 0.85
_OPTIONAL_ATTRIBUTES = {
    *("directions", "classes", "axes", "longest", "shortest", "quantiles", "serving_inputs", "serving_outputs")
}
_OPTIONAL_METHODS = {
    *("predicted", "actual", "queries", "probabilities", "slices", "baseline", "example", "text", "show", "collate"),
    *("instances", "answer", "predicted_quantiles"),
    *("sample_lengths", "sample_groups", "sample_weights", "adapt", "make_files", "use_files", "language_model"),
    *("prompting", "parallelize", "loss_weight", "optimizer", "export_model", "reference"),
}
_METHODS = {
    "model": "model()",
    "data": "data(split)",
    "loss": "loss(outputs, batch)",
    "metrics": "metrics(outputs, batch)",
}


SHARED_FOLDER = "files"  # of the prepare step's output
KEY = "files"  # in data.json, whose own digest is part of every later step's key and of the bundle's lineage


def make_shared_files(task: Task, folder: Path) -> None:
    """Let the task create its shared files, and load them."""
    if isinstance(task, HasFiles):
        folder.mkdir(parents=True, exist_ok=True)
        task.make_files(folder)
        _check_plain(folder)
        task.use_files(folder)


def shared_file_digests(folder: Path) -> dict[str, str]:
    """Return the digests of the shared files by path below the folder, as recorded in data.json."""
    return digest_tree(folder) if folder.is_dir() else {}


def open_task(run: Run, root: Path) -> Task:
    """Load the task with its shared files, in every step after prepare."""
    task = load_task(run.config.task, root, run.config.trains)
    if isinstance(task, HasFiles):
        task.use_files(shared_files_folder(run))
    return task


def shared_files_folder(run: Run) -> Path:
    """Return the folder of the shared files, after checking that no file has changed since prepare."""
    folder, report = run.output("prepare") / SHARED_FOLDER, run.output("prepare") / "data.json"
    if not report.is_file():
        raise DataError(f"{report}: missing, so the files that the task shares are unknown; run the prepare step first")
    recorded: Mapping[str, Any] = read_object(report).get(KEY, {})
    digests = shared_file_digests(folder)
    if changed := sorted(name for name in recorded.keys() | digests.keys() if recorded.get(name) != digests.get(name)):
        raise DataError(f"{folder / changed[0]}: changed since prepare; `pipe run all` creates it again")
    return folder


def _check_plain(folder: Path) -> None:
    """Reject links: their targets have no digest, and are missing in a pod."""
    for path in sorted(folder.rglob("*")):
        mode = path.lstat().st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            raise DataError(
                f"make_files() left {path.relative_to(folder)}, which is not a plain file; write a copy of it"
            )


def build_model(task: Task, run: Run) -> nn.Module:
    """Build the model without its trained weights, from the files that prepare kept."""
    return new_model(task, run.config, lambda: shared_files_folder(run))


def new_model(task: Task, config: Config, files: Callable[[], Path]) -> nn.Module:
    return require_adapt(task, config.task).adapt(files()) if config.model.is_described else task.model()


def require_adapt(task: Task, reference: str) -> HasPretrained:
    if not isinstance(task, HasPretrained):
        raise ConfigError(
            f"{reference}: has no method adapt(folder), which builds the model for model.pretrained; "
            "write it, or leave model.pretrained out"
        )
    return task


def load_weights(model: nn.Module, path: Path, device: torch.device | str = "cpu") -> nn.Module:
    """Load all weights into a model and set evaluation mode."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        weights = OrderedDict(load_file(path, device=str(device)))
        weights._metadata = model.state_dict()._metadata  # type: ignore[attr-defined]  # versions, as MNASNet needs
        model.load_state_dict(weights)
    except (SafetensorError, RuntimeError, OSError) as error:
        raise StageError(f"{path}: does not fit the task's model: {' '.join(str(error).split())[:400]}") from error
    return model.to(device).eval()


def transformers_model(model: nn.Module) -> tuple[str, nn.Module] | None:
    """Return the name and module of the outermost transformers model, if there is one."""
    if "transformers" not in sys.modules:  # then no task has built one
        return None
    from transformers import PreTrainedModel

    return next(((name, module) for name, module in model.named_modules() if isinstance(module, PreTrainedModel)), None)


def load_class(reference: str, root: Path, package: str = "") -> Any:
    """Import the class of a reference; the files of the project come before installed modules of the same name.

    A process that loads several projects gives each a package of its own.
    """
    file, _, name = reference.partition(":")
    path = (root / file).resolve()
    if not path.is_file():
        raise ConfigError(f"{reference}: no file {file} in {root}")
    try:
        module = import_file(path, root.resolve(), package)
    except (Exception, SystemExit) as error:  # a script without a main guard must not end the step
        text = describe(error, root.resolve()).replace(f"{PROJECT}.", "")
        missing = (error.name or "") if isinstance(error, ModuleNotFoundError) else ""
        is_internal = missing.startswith("pipeline.") and not missing.startswith(f"{PROJECT}.")
        fix = "; to fix it: import the name from `pipeline`" if is_internal else ""
        raise ConfigError(f"{path.name}: import failed: {text}{fix}") from error
    if not hasattr(module, name):
        raise ConfigError(f"{reference}: {file} has no class {name}")
    return getattr(module, name)
