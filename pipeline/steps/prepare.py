"""The prepare step: fingerprint the data, find leaks between splits, run the data checks, record pretrained weights."""

from __future__ import annotations

import ast
import inspect
import shutil
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.contract.config import Config
from pipeline.contract.data import Samples, axis_sizes, check_columns, example_batch, open_split
from pipeline.contract.pretrained import (
    PRETRAINED_KEY,
    Pretrained,
    copy_small_files,
    find_pretrained,
    planned_files,
    record,
)
from pipeline.contract.prompting import check_decoder, check_prompting
from pipeline.contract.run import Run, describe, step_main
from pipeline.contract.task import (
    KEY,
    SHARED_FOLDER,
    SPLITS,
    Generates,
    HasSampleGroups,
    HasSampleLengths,
    HasSampleWeights,
    Task,
    check_export,
    load_task,
    make_shared_files,
    misspelled_members,
    require_adapt,
    shared_file_digests,
)
from pipeline.data_checks.near_duplicates import Digests
from pipeline.data_checks.run_checks import check_data, report_results, write_checks
from pipeline.data_checks.scan import SplitSummary
from pipeline.statistics.metrics import check_directions, lower_is_better
from pipeline.system.errors import ConfigError, DataError, PipelineError, ResourceError
from pipeline.system.files import write_json
from pipeline.user.readers import write_read_files
from train.batch_order import ORDER_KEY, Kind, check_order_values, write_order
from train.sample_checksums import write_checksums

if TYPE_CHECKING:
    from torch import nn

_MAX_LISTED = 100  # duplicates in data.json; all are counted


def prepare(run: Run, root: Path) -> None:
    config = run.config
    task = load_task(config.task, root)
    check_export(task, config.export)
    files = run.partial("prepare") / SHARED_FOLDER
    shutil.rmtree(files, ignore_errors=True)  # of an interrupted attempt
    pretrained = find_pretrained(config, root)
    if pretrained:
        copy_small_files(pretrained, files)
    make_shared_files(task, files)
    digest, check_texts = _check_pretrained(pretrained, task, run) if pretrained else ("", None)
    pretrained_part = {PRETRAINED_KEY: digest} if pretrained else {}
    splits = {name: open_split(task, name) for name in SPLITS}
    for samples in splits.values():
        check_columns(task, samples)
    axis_sizes(task, example_batch(task, splits["test"]))  # a mistake that the export would find after training
    check_language_export(task, config, files, (splits["validation"], splits["test"]))  # training rows may be packed
    if check_texts:
        check_texts(splits.values())
    checked = check_data(run, task, splits)
    pairs = find_duplicates({name: reading.digests for name, reading in checked.splits.items()})
    report: dict[str, Any] = {
        "splits": {name: _describe(reading) for name, reading in checked.splits.items()},
        KEY: shared_file_digests(files),
        **pretrained_part,
        **_write_order(task, splits["train"], run.partial("prepare")),
        **write_checksums(splits["train"], run.partial("prepare")),
        "duplicate_count": len(pairs),
        "duplicates": pairs[:_MAX_LISTED],
    }
    write_json(run.partial("prepare") / "data.json", report)
    write_checks(checked, run.partial("prepare"), lower_is_better(task))
    write_read_files(root, run.partial("prepare"))
    for warning in (check_directions(task, _metric_names(task)), misspelled_members(task)):
        if warning:
            print(f"warning: {warning}", file=sys.stderr)
    if report[KEY]:
        print(f"files that model, data and codec share: {', '.join(report[KEY])}")
    for name, facts in report["splits"].items():
        print(f"{name}: {facts['samples']} samples, fingerprint {facts['fingerprint'][:12]}")
    if pairs:
        _report_duplicates(pairs, config.prepare.leaks, run.partial("prepare") / "data.json")
    report_results(checked)


def check_language_export(task: Task, config: Config, files: Path, splits: Iterable[Samples] = ()) -> None:
    """Refuse a language model that cannot be exported, before it is trained."""
    if not isinstance(task, Generates):
        return
    from train.pretrained.materialize import MetaModel

    check_prompting(task, files)
    build = partial(require_adapt(task, config.task).adapt, files) if config.model.pretrained else task.model

    def build_causal_model() -> nn.Module:
        return task.language_model(build())  # which may copy weights from one model to another

    try:
        model = MetaModel(build_causal_model).model
    except (RuntimeError, NotImplementedError):  # it computes with its weights while it is built
        model = build_causal_model()
    check_decoder(task, model, config.export, splits)


def check_planned_export(config: Config, root: Path, prepared: Path | None) -> str:
    """Check what prepare would find about the export; return why that is not possible here, if so.

    `prepared`: the shared files of a prepare step that is reused; without it, they are made in a temporary folder.
    """
    try:
        task = load_task(config.task, root)
        check_export(task, config.export)
        if isinstance(task, Generates):
            with tempfile.TemporaryDirectory() as temporary:
                check_language_export(task, config, planned_files(task, config, root, prepared, Path(temporary)))
    except PipelineError as error:
        if isinstance(error.__cause__, ModuleNotFoundError | FileNotFoundError) or isinstance(error, ResourceError):
            return str(error)
        raise
    except Exception as error:  # the user's code, which may run elsewhere
        return describe(error, root)
    return ""


def _metric_names(task: Task) -> list[str]:
    """Return the texts that are keys in metrics(); the model is not run here."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(type(task).metrics)))
    except (OSError, TypeError, SyntaxError):  # no source
        return []
    keys: list[ast.expr | None] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            keys += node.keys
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            keys.append(node.slice)
    return [key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str)]


def _check_pretrained(pretrained: Pretrained, task: Task, run: Run) -> tuple[str, Callable[[Iterable[Samples]], None]]:
    """Check that the weights fit the task's model; return their digest, and a check of the data's texts.

    Done here, so that a mistake is found before many processes start.
    """
    from train.pretrained.adapter import add_adapter  # transformers is slow to load
    from train.pretrained.load import match_weights
    from train.validation import check_texts, check_tokenizer

    config, directory = run.config, run.partial("prepare")
    skeleton, match = match_weights(
        partial(require_adapt(task, config.task).adapt, directory / SHARED_FOLDER),
        pretrained,
        config.model.allow_mismatch,
    )
    check_tokenizer(directory / SHARED_FOLDER, skeleton.model)
    add_adapter(skeleton.model, config.model)
    digest = record(pretrained, directory)
    if match.left_out:
        print(f"left out: {len(match.left_out)} weights that this kind of model does not use, as {match.left_out[0]}")
    source = config.model.pretrained + (f" (run {pretrained.folder.resolve().name})" if pretrained.is_run else "")
    print(f"pretrained: {source}, {len(pretrained.weights)} files of weights, digest {digest[:12]}")
    return digest, partial(check_texts, task, skeleton.model)


def find_duplicates(digests: Mapping[str, Sequence[str] | Digests]) -> list[dict[str, Any]]:
    """Return every sample that is also in an earlier split, as a pair of places."""
    all_digests = np.concatenate([np.asarray(values) for values in digests.values()])
    _, first_index, group = np.unique(all_digests, return_index=True, return_inverse=True)
    starts = np.cumsum([0, *(len(values) for values in digests.values())])
    split = np.repeat(np.arange(len(digests)), np.diff(starts))
    earliest = first_index[group.reshape(-1)]
    duplicates = np.flatnonzero(split[earliest] != split)
    duplicates = duplicates[np.argsort(earliest[duplicates], kind="stable")]
    names = list(digests)

    def location(index: Any) -> dict[str, Any]:
        return {"split": names[split[index]], "index": int(index - starts[split[index]])}

    return [{"a": location(earliest[index]), "b": location(index)} for index in duplicates]


def _write_order(task: Task, train: Samples, folder: Path) -> dict[str, dict[str, str]]:
    """Record the order in which the task wants its training samples; empty for a shuffle."""
    methods: dict[Kind, Callable[[Any], Any]] = {}
    if isinstance(task, HasSampleWeights):
        methods["weights"] = task.sample_weights
    if isinstance(task, HasSampleGroups):
        methods["groups"] = task.sample_groups
    if isinstance(task, HasSampleLengths):
        methods["lengths"] = task.sample_lengths
    names = " and ".join(f"sample_{kind}()" for kind in methods)
    if len(methods) > 1 or (methods and train.is_stream):
        other = "data('train') is a stream, which has its own order" if train.is_stream else "only one can be used"
        raise ConfigError(f"the task has {names}, but {other}; to fix it, remove one of them")
    if train.is_stream:
        return {ORDER_KEY: write_order("stream", None, folder)}
    for kind, method in methods.items():
        values = check_order_values(kind, method(train.source), len(train))
        return {ORDER_KEY: write_order(kind, values, folder)}
    return {}


def _describe(reading: SplitSummary) -> dict[str, Any]:
    return {"samples": reading.samples, "fingerprint": reading.fingerprint, "classes": reading.classes}


def _report_duplicates(pairs: list[dict[str, Any]], leaks: str, listing: Path) -> None:
    a, b = pairs[0]["a"], pairs[0]["b"]
    scope = "all are" if len(pairs) <= _MAX_LISTED else f"the first {_MAX_LISTED} are"
    text = (
        f"{len(pairs)} samples are in more than one split, as {b['split']}[{b['index']}] = "
        f"{a['split']}[{a['index']}]; {scope} listed in {listing.parent.name}/{listing.name}. "
        "Remove them, or set prepare.leaks=warn to accept an unfair test"
    )
    if leaks == "error":
        for pair in pairs[:20]:
            print(f"duplicate: {pair['b']['split']}[{pair['b']['index']}] = {pair['a']['split']}[{pair['a']['index']}]")
        raise DataError(text)
    print(f"warning: {text}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(step_main("prepare", prepare, sys.argv[1:]))
