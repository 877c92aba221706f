"""The check step: before training, an untrained model goes through the whole pipeline with two small batches.

It calls the functions of the steps themselves, in their order, so that a mistake ends the run within seconds and not
after a training. What only a trained model shows is not judged: the rules of the gate, and errors of quantization.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import os
import re
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from export.bundle import Sources, fill_bundle
from export.checks.verify import write_and_compare
from export.kinds import open_exporter
from export.other_formats import require_formats, write_formats
from export.subject import Subject
from export.variants.choose import VariantEvaluation
from pipeline.contract.bundle import Ancestors, open_bundle, write_manifest
from pipeline.contract.codec import Codec, load_codec
from pipeline.contract.data import Samples, check_call, check_columns, is_stream
from pipeline.contract.pretrained import PRETRAINED_KEY, Pretrained, copy_small_files, find_pretrained
from pipeline.contract.prompting import check_decoder, check_prompting
from pipeline.contract.run import CHECKED_FILES, Run, describe, step_main
from pipeline.contract.task import (
    SHARED_FOLDER,
    Batch,
    Classifier,
    Generates,
    HasCollate,
    Predictor,
    Task,
    check_export,
    load_task,
    make_shared_files,
    misspelled_members,
    new_model,
    served_model,
    serving_form,
    splits_to_read,
)
from pipeline.evaluate.__main__ import score_samples
from pipeline.evaluate.baseline import find_baseline
from pipeline.evaluate.codec_check import check_codec
from pipeline.evaluate.results import Results, metrics_body
from pipeline.evaluate.slices import check_slice_labels
from pipeline.evaluate.worst_samples import worst_body
from pipeline.statistics.metrics import check_directions, lower_is_better
from pipeline.statistics.scores import candidate_predictor
from pipeline.system.errors import ConfigError, DataError, PipelineError
from pipeline.system.files import digest_file, write_json
from pipeline.system.processes import Rank
from pipeline.user.readers import write_read_files
from serve.runtime.selfcheck import check_golden_requests
from serve.runtime.session import Session
from train.optim import Precision, check_optimizer_state, learning_rate, make_optimizer, seed_step, set_learning_rate
from train.parallel.base import Objective, Strategy
from train.pretrained.adapter import add_adapter
from train.pretrained.load import match_weights
from train.pretrained.materialize import MetaModel
from train.process_group import ProcessGroup
from train.validation import check_loss_weight, check_texts, check_tokenizer, validate

_ROWS = 8  # of each of the two batches
_MOST_WEIGHTS = 1 << 27  # of a model that is tried; larger ones take minutes, and gigabytes
_ROUNDING = 1e-2  # tolerated of an untrained model, whose outputs may be nearly constant; a wrong graph differs by more
_CPU = torch.device("cpu")


def check(run: Run, root: Path) -> None:
    with tempfile.TemporaryDirectory(dir=run.partial("check")) as temporary:
        made = Path(temporary) / CHECKED_FILES
        facts = try_pipeline(run, root, Path(temporary))
        shutil.rmtree(run.path / CHECKED_FILES, ignore_errors=True)
        if made.is_dir() and "prepare" in run.read().wanted:
            made.rename(run.path / CHECKED_FILES)
    write_json(run.partial("check") / "check.json", facts)


def try_pipeline(run: Run, root: Path, folder: Path) -> dict[str, Any]:
    """Send two batches through everything, and return what was seen."""
    config, parts, files = run.config, Parts(root), folder / CHECKED_FILES / SHARED_FOLDER
    with parts("task and codec"):
        task = load_task(config.task, root, config.trains)
        parts.owners.append(task)
        check_export(task, config.export)
        if pretrained := find_pretrained(config, root):
            copy_small_files(pretrained, files)
        make_shared_files(task, files)
        if files.is_dir():
            write_read_files(root, files.parent)
            (files.parent / PRETRAINED_KEY).write_text(str(pretrained))
        check_prompting(task, files)
        codec = load_codec(config.codec, root, files=files)
        parts.owners.append(codec)
    with parts("data()"):
        whole = [_open_split(task, name) for name in splits_to_read(config)]
        splits = {samples.split: samples.first(2 * _ROWS) for samples in whole}
        parts.batch = _first_batch(splits[whole[0].split])
        _warn_of_columns(splits)
    trial = Trial(run, root, folder, files, task, codec, splits, parts)
    if warning := misspelled_members(task):
        print(f"warning: {warning}", file=sys.stderr)
    facts: dict[str, Any] = {"columns": _describe(parts.batch), "seconds": parts.seconds}
    with parts("model()"):
        weights = _check_weights(trial, pretrained, whole)
    if weights > _MOST_WEIGHTS:
        print(f"a model of {weights:,} weights is not tried before it is trained; its data and settings were checked")
        return facts
    if not config.trains:  # the steps themselves begin at once
        return facts
    with _process_group():
        model = _train(trial, facts)
    with parts("export_model()"):
        model, task = served_model(task, model), serving_form(task)
        trial = replace(trial, task=task)
        check_call(task, model)
        check_columns(task, trial.splits["test"])
    predict = candidate_predictor(model, task, _CPU)
    _evaluate(trial, predict, facts)
    with parts("codec"):
        facts["codec"] = _check_codec(trial, predict)
    _export(trial, model, facts)
    print(f"an untrained model went through the pipeline in {sum(parts.seconds.values()):.1f} s")
    return facts


@dataclass(frozen=True)
class Trial:
    """What goes through the pipeline."""

    run: Run
    root: Path
    folder: Path  # for files that are not kept
    files: Path  # what model, data and codec share
    task: Task
    codec: Codec
    splits: Mapping[str, Samples]  # of two batches each
    parts: Parts

    def build(self) -> nn.Module:
        """Build the model without trained or pretrained weights."""
        return new_model(self.task, self.run.config, lambda: self.files)


class Parts:
    """The parts of the check by name, with their seconds; an error in one names the line of the user's code."""

    def __init__(self, root: Path) -> None:
        self.seconds: dict[str, float] = {}
        self.owners: list[object] = []  # of the user's methods
        self.batch: Batch = {}
        self._root = root

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        except PipelineError as error:
            raise type(error)(f"{error}{self._place(str(error), name)}") from error
        except (ImportError, OSError):  # a package or the disk, which every step describes in one way
            raise
        except Exception as error:  # of the user's code, or of torch
            traceback.print_exc()
            text = f"{name}: {describe(error, self._root)}"
            columns = ", ".join(f"`{column}` {kind}" for column, kind in _describe(self.batch).items())
            raise DataError(
                f"{text}{self._place(text, name)}" + (f"; columns: {columns}" if columns else "")
            ) from error
        self.seconds[name] = round(time.perf_counter() - started, 3)

    def _place(self, text: str, part: str) -> str:
        """Return the line of what a text names of the user's, or its part of the check, if it has no line yet."""
        if re.search(r"\bline \d", text):
            return ""
        names = [*re.findall(r"(\w+)\(", text), *re.findall(r"`(\w+)`", text), *re.findall(r"(\w+)\(", part)]
        places = (place for name in names for owner in self.owners if (place := _line(owner, name, self._root)))
        return next((f" ({place})" for place in places), "")


def _line(owner: object, name: str, root: Path) -> str:
    """Return the file and line of a method or attribute that a class of the project defines; empty without one."""
    for kind in type(owner).__mro__:
        if name not in vars(kind):
            continue
        with contextlib.suppress(OSError, TypeError):
            file = Path(inspect.getsourcefile(kind) or "")
            lines, first = inspect.getsourcelines(kind)
            found = (i for i, line in enumerate(lines) if re.match(rf"\s*(async def |def )?{name}\b", line))
            if file.resolve().is_relative_to(root) and (offset := next(found, None)) is not None:
                return f"{file.name}, line {first + offset}"
    return ""


def _describe(batch: Mapping[str, Tensor]) -> dict[str, str]:
    return {name: f"{str(column.dtype).removeprefix('torch.')} {list(column.shape)}" for name, column in batch.items()}


def _open_split(task: Task, split: str) -> Samples:
    source = task.data(split)
    collate = task.collate if isinstance(task, HasCollate) else None
    count = 2 * _ROWS if is_stream(source) else 0  # a stream is not read to its end
    samples = Samples(split, source, collate, count, whole=False)
    check_columns(task, samples)
    return samples


def _warn_of_columns(splits: Mapping[str, Samples]) -> None:
    columns = {name: samples.batch([0]).keys() for name, samples in splits.items()}
    for name in sorted(set.union(*map(set, columns.values()))):
        if missing := [split for split in splits if name not in columns[split]]:
            others = " and ".join(f"data({split!r})" for split in splits if split not in missing)
            print(f"warning: only {others} has the column `{name}`", file=sys.stderr)


def _first_batch(samples: Samples) -> Batch:
    return samples.batch(range(min(_ROWS, len(samples))))


def _check_weights(trial: Trial, pretrained: Pretrained | None, whole: Sequence[Samples]) -> int:
    """Check what is known without memory for the weights, and return their number."""
    config, task = trial.run.config, trial.task
    if pretrained:
        skeleton, match = match_weights(trial.build, pretrained, config.model.allow_mismatch)
        check_tokenizer(trial.files, skeleton.model)
        add_adapter(skeleton.model, config.model)
        if match.left_out:
            unused = f"{len(match.left_out)} weights that this kind of model does not use, as {match.left_out[0]}"
            print(f"left out: {unused}")
    model = MetaModel(trial.build).model
    if config.trains and not list(model.parameters()):  # such as an ONNX file
        raise ConfigError("model(): has no weights to train; to fix it: set train.epochs=0, or return the torch model")
    check_texts(task, model, whole)
    if isinstance(task, Generates):  # which may copy weights from one model to another
        causal = MetaModel(lambda: task.language_model(trial.build())).model
        check_decoder(task, causal, config.export, list(trial.splits.values())[-2:])
    return sum(weight.numel() for weight in model.parameters())


@contextlib.contextmanager
def _process_group() -> Iterator[None]:
    """Be the only process of a training, for a task whose code calls torch.distributed or reads its variables."""
    before = dict(os.environ)
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        dist.destroy_process_group()
        os.environ.clear()
        os.environ.update(before)


def _train(trial: Trial, facts: dict[str, Any]) -> nn.Module:
    """Make one step of training and a validation; return the model, without adapters, ready to evaluate."""
    task, config, parts = trial.task, trial.run.config, trial.parts
    settings = config.train.model_copy(update={"compile": False})
    train, validation = trial.splits["train"], trial.splits["validation"]
    group = ProcessGroup(Rank(), _CPU)
    seed_step(settings.seed, -1, 0)
    with parts("model()"):
        model = add_adapter(trial.build(), config.model)
        parts.owners.append(model)
        check_call(task, model)
    strategy = Strategy(model, Objective(task, Precision("fp32", _CPU)), group, settings)
    strategy.module.train()
    with parts("forward()"):
        strategy.objective.outputs(strategy.module, parts.batch)
    with parts("loss()"):
        check_loss_weight(task, train)
        loss = strategy.objective.loss(strategy.module, parts.batch)
        _check_loss(loss)
    with parts("backward of loss()"):
        strategy.objective.backward(loss)
    with parts("optimizer()"):
        optimizer = make_optimizer(strategy.model, settings, task)
        set_learning_rate(optimizer, learning_rate(0, 1, settings))
        optimizer.step()
        check_optimizer_state(optimizer)
    with parts("metrics()"):
        facts |= {"loss": float(loss.detach()), "validation": validate(task, strategy, validation, group, _ROWS)}
    return model.eval() if config.model.adapter == "none" else trial.build().eval()


def _check_loss(loss: object) -> None:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        found = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise DataError(f"loss(): must return one number, the mean over the batch, and returned {found}")
    if not loss.requires_grad:
        raise DataError("loss(): depends on no trained weight; compute it with torch from what the model returned")
    if not math.isfinite(loss.item()):
        raise DataError(f"loss(): is {loss.item()} for the first {_ROWS} samples and an untrained model")


def _evaluate(trial: Trial, predict: Predictor, facts: dict[str, Any]) -> None:
    task, run, parts, samples = trial.task, trial.run, trial.parts, trial.splits["test"]
    config, parts.batch = run.config.evaluate, _first_batch(samples)
    with parts("baseline()"):
        baseline = find_baseline(task, samples, run, checkpoint="")
    with parts("evaluation"):
        columns = score_samples(task, predict, baseline, samples, range(len(samples)), config)
        kind, bundle = (None, None) if baseline is None else (baseline.kind, baseline.bundle)
        classes = task.classes if isinstance(task, Classifier) else None
        results = Results(columns, kind, bundle, classes, lower_is_better(task), named=config.named_metrics)
        check_directions(task, list(results.candidate))
        results.check(config)
        check_slice_labels(columns)
        facts["metrics"] = sorted(metrics_body(config, results, "")["candidate"])
        worst_body(run, task, samples, results, config.metric, predict)


def _check_codec(trial: Trial, predict: Predictor) -> list[str]:
    config = trial.run.config
    found = check_codec(trial.task, trial.codec, config.codec, trial.splits["test"], predict, trial.files)
    if not (rule := found.rule(config.evaluate.answers)).passed:
        raise ConfigError(found.faults[0] if found.faults else rule.detail)
    return [found.summary, *found.checked, *found.notes]


def _export(trial: Trial, model: nn.Module, facts: dict[str, Any]) -> None:
    """Write the file, its variants and other formats, and answer the golden requests as the service does."""
    task, parts, samples = trial.task, trial.parts, trial.splits["test"].collated()
    export = trial.run.config.export
    export = export.model_copy(update={name: max(getattr(export, name), _ROUNDING) for name in ("rtol", "atol")})
    config, bundle = trial.run.config.model_copy(update={"export": export}), trial.folder / "bundle"
    bundle.mkdir()
    with parts("export of forward()"):
        exporter = open_exporter(Subject(task, model, samples, export, bundle / "model.onnx", files=trial.files))
        report = write_and_compare(exporter)
        report.require(export)
    with parts("formats and variants"):
        require_formats(write_formats(exporter, trial.folder / "formats"))
        VariantEvaluation(exporter, config, trial.folder / "variants", exporter.converters).make_all()
    with parts("golden requests"):
        batch = samples.batch(range(len(samples)))
        missing = frozenset(name for name, column in batch.items() if column.isnan().any())
        properties = replace(exporter.properties, padding=report.last_check.padding, missing=missing)
        fill_bundle(bundle, exporter, config, Sources(trial.root, trial.files), properties)
        (bundle / "card.md").touch()  # it describes a trained model
        onnx = digest_file(bundle / "model.onnx")
        write_manifest(bundle, config.name, "pass", Ancestors(code="", data="", checkpoint="", verdict="", onnx=onnx))
        opened = open_bundle(bundle)
        check_golden_requests(opened, Session(opened, "cpu", 0))
    facts["largest_difference"] = max(row["max_abs_error"] for row in report.rows)
    facts["golden_requests"] = len(opened.golden().instances)


def main(argv: Sequence[str]) -> int:
    return step_main("check", check, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
