"""The prepare step: fingerprint the data, find leaks between splits, run the data checks, record pretrained weights."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.contract.data import Samples, check_columns, fingerprint, open_split, sample_digests
from pipeline.contract.pretrained import PRETRAINED_KEY, Pretrained, copy_small_files, find_pretrained, record
from pipeline.contract.run import CHECKED_FILES, Run, step_main
from pipeline.contract.task import (
    KEY,
    SHARED_FOLDER,
    HasFiles,
    HasSampleGroups,
    HasSampleLengths,
    HasSampleWeights,
    Task,
    load_task,
    make_shared_files,
    serving_form,
    shared_file_digests,
    splits_to_read,
)
from pipeline.data_checks.run_checks import check_data, describe_data, report_results, write_checks
from pipeline.data_checks.scan import SplitSummary
from pipeline.statistics.metrics import lower_is_better
from pipeline.system.errors import ConfigError, DataError
from pipeline.system.files import write_json
from pipeline.user.readers import changed_read_files, recall_read_files, write_read_files
from train.batch_order import ORDER_KEY, Kind, check_order_values, write_order
from train.sample_checksums import write_checksums

_MAX_LISTED = 100  # identical samples in data.json; all are counted
_COMPARED = 64  # samples at the beginning of a split that show whether it is random, or has other targets


def prepare(run: Run, root: Path) -> None:
    config = run.config
    task = load_task(config.task, root, config.trains)
    files = run.partial("prepare") / SHARED_FOLDER
    shutil.rmtree(files, ignore_errors=True)  # of an interrupted attempt
    pretrained = find_pretrained(config, root)
    if _take_files(run, root, pretrained, files):
        if isinstance(task, HasFiles):
            task.use_files(files)
    else:
        if pretrained:
            copy_small_files(pretrained, files)
        make_shared_files(task, files)
    task = serving_form(task)
    pretrained_part = {PRETRAINED_KEY: _record_pretrained(pretrained, run)} if pretrained else {}
    splits = {name: open_split(task, name) for name in splits_to_read(config)}
    for samples in splits.values():
        check_columns(task, samples)
    checked = check_data(run, task, splits) if config.trains else describe_data(task, splits, config.prepare)
    report: dict[str, Any] = {
        "splits": {name: _describe(reading) for name, reading in checked.splits.items()},
        KEY: shared_file_digests(files),
        **pretrained_part,
        **(_describe_training(task, splits["train"], run.partial("prepare")) if config.trains else {}),
        "duplicate_count": len(checked.duplicates),
        "duplicates": checked.duplicates[:_MAX_LISTED],
    }
    write_json(run.partial("prepare") / "data.json", report)
    write_checks(checked, run.partial("prepare"), lower_is_better(task))
    write_read_files(root, run.partial("prepare"))
    if report[KEY]:
        print(f"files that model, data and codec share: {', '.join(report[KEY])}")
    for name, facts in report["splits"].items():
        print(f"{name}: {facts['samples']} samples, fingerprint {facts['fingerprint'][:12]}")
    if checked.duplicates and config.prepare.copies != "off":
        _refuse_random_splits(task, splits)
    report_results(checked)


def _take_files(run: Run, root: Path, pretrained: Pretrained | None, files: Path) -> bool:
    """Take the files that check made in this run, unless what they were made of changed since; return whether."""
    made = run.path / CHECKED_FILES
    if not (made / SHARED_FOLDER).is_dir() or changed_read_files(root, made):
        return False
    if (made / PRETRAINED_KEY).read_text() != str(pretrained):
        return False
    recall_read_files(made)
    (made / SHARED_FOLDER).rename(files)
    return True


def _record_pretrained(pretrained: Pretrained, run: Run) -> str:
    config, directory = run.config, run.partial("prepare")
    digest = record(pretrained, directory)
    source = config.model.pretrained + (f" (run {pretrained.folder.resolve().name})" if pretrained.is_run else "")
    print(f"pretrained: {source}, {len(pretrained.weights)} files of weights, digest {digest[:12]}")
    return digest


def _describe_training(task: Task, train: Samples, folder: Path) -> dict[str, Any]:
    return {
        **_write_order(task, train, folder),
        **write_checksums(train, folder),
        "targets": _describe_targets(task, train.first(_COMPARED)),
    }


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


def _describe_targets(task: Task, samples: Samples) -> dict[str, str]:
    """Return a digest of each sample's targets by that of its inputs, and the names of the classes."""
    classes = {"classes": ", ".join(map(str, getattr(task, "classes", ())))}
    names = {column: column in task.inputs for column in next(iter(samples.single_rows(range(1))))}
    inputs, targets = ([name for name in names if names[name] == kind] for kind in (True, False))
    if not inputs or not targets:
        return classes
    return {**dict(zip(*(sample_digests(samples, columns) for columns in (inputs, targets)), strict=True)), **classes}


def _describe(reading: SplitSummary) -> dict[str, Any]:
    return {"samples": reading.samples, "fingerprint": reading.fingerprint, "classes": reading.classes}


def _refuse_random_splits(task: Task, splits: Mapping[str, Samples]) -> None:
    """Raise where data() gives other samples when it is called again: then the splits overlap by chance."""
    for name, samples in splits.items():
        first, again = (each.first(_COMPARED) for each in (samples, open_split(task, name)))
        if fingerprint(first) != fingerprint(again):
            raise DataError(
                f"data({name!r}): differs each time it is called, so that a sample may be in several splits; to fix "
                "it: give the random numbers that divide the data a fixed seed"
            )


def main(argv: Sequence[str]) -> int:
    return step_main("prepare", prepare, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
