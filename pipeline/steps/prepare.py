"""The prepare step: what the data is (fingerprints, class balance), whether its splits leak, what checks say.

Pretrained weights before training: their small files are kept by prepare, and all they are is recorded.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.contract.data import Samples, check_columns, open_split
from pipeline.contract.errors import DataError
from pipeline.contract.files import write_json
from pipeline.contract.pretrained import (
    Pretrained,
)
from pipeline.contract.run import Run, run_step
from pipeline.contract.task import FOLDER, KEY, SPLITS, Task, adapting, companions_in, load_task, make_companions
from pipeline.data_checks.near_duplicates import Digests
from pipeline.data_checks.run_checks import look, tell, write_look
from pipeline.data_checks.scan import Reading
from pipeline.steps.pretrained import PRETRAINED_KEY, copy_small_files, find_pretrained, record

_LISTED = 100  # duplicates written out; all are counted


def prepare(run: Run, root: Path) -> None:
    config = run.config
    task = load_task(config.task, root)
    files = run.partial("prepare") / FOLDER
    shutil.rmtree(files, ignore_errors=True)  # an interrupted attempt's
    pretrained = find_pretrained(config, root)
    if pretrained:
        copy_small_files(pretrained, files)
    make_companions(task, files)
    digest, look_at = _checked(pretrained, task, run) if pretrained else ("", None)
    begun = {PRETRAINED_KEY: digest} if pretrained else {}
    splits = {name: open_split(task, name) for name in SPLITS}
    for samples in splits.values():
        check_columns(task, samples)
    if look_at:
        look_at(splits.values())
    found = look(run, task, splits)
    pairs = find_duplicates({name: reading.digests for name, reading in found.readings.items()})
    report: dict[str, Any] = {
        "splits": {name: _describe(reading) for name, reading in found.readings.items()},
        KEY: companions_in(files),
        **begun,
        "duplicate_count": len(pairs),
        "duplicates": pairs[:_LISTED],
    }
    write_json(run.partial("prepare") / "data.json", report)
    write_look(found, run.partial("prepare"))
    if report[KEY]:
        print(f"files that model, data and codec share: {', '.join(report[KEY])}")
    for name, facts in report["splits"].items():
        print(f"{name}: {facts['samples']} samples, fingerprint {facts['fingerprint'][:12]}")
    if pairs:
        _judge(pairs, config.prepare.leaks, run.partial("prepare") / "data.json")
    tell(found)


def _checked(found: Pretrained, task: Task, run: Run) -> tuple[str, Callable[[Iterable[Samples]], None]]:
    """The digest of weights that fit the task's model, and what looks whether its texts do.

    What does not fit is told here, before many processes begin.
    """
    from train.pretrained.load import fitted  # others do without transformers
    from train.validation import check_texts, check_tokenizer

    config, directory = run.config, run.partial("prepare")
    bare, matched = fitted(partial(adapting(task, config.task).adapt, directory / FOLDER), found, config.model.allow)
    check_tokenizer(directory / FOLDER, bare.model)
    digest = record(found, directory)
    if matched.left_out:
        print(f"left out: {len(matched.left_out)} weights this kind of model has no use for, as {matched.left_out[0]}")
    where = config.model.pretrained + (f" (run {found.folder.resolve().name})" if found.of_run else "")
    print(f"pretrained: {where}, {len(found.weights)} files of weights, digest {digest[:12]}")
    return digest, partial(check_texts, task, bare.model)


def find_duplicates(digests: Mapping[str, Sequence[str] | Digests]) -> list[dict[str, Any]]:
    """Every sample that also stands in an earlier split, as pairs of places."""
    joined = np.concatenate([np.asarray(values) for values in digests.values()])
    _, first, group = np.unique(joined, return_index=True, return_inverse=True)
    starts = np.cumsum([0, *(len(values) for values in digests.values())])
    split = np.repeat(np.arange(len(digests)), np.diff(starts))
    earliest = first[group.reshape(-1)]
    later = np.flatnonzero(split[earliest] != split)
    later = later[np.argsort(earliest[later], kind="stable")]
    names = list(digests)

    def place(index: Any) -> dict[str, Any]:
        return {"split": names[split[index]], "index": int(index - starts[split[index]])}

    return [{"a": place(earliest[index]), "b": place(index)} for index in later]


def _describe(reading: Reading) -> dict[str, Any]:
    return {"samples": reading.samples, "fingerprint": reading.fingerprint, "classes": reading.classes}


def _judge(pairs: list[dict[str, Any]], leaks: str, listing: Path) -> None:
    a, b = pairs[0]["a"], pairs[0]["b"]
    listed = "all are" if len(pairs) <= _LISTED else f"the first {_LISTED} are"
    text = (
        f"{len(pairs)} samples stand in more than one split, as {b['split']}[{b['index']}] = "
        f"{a['split']}[{a['index']}]; {listed} listed in {listing.parent.name}/{listing.name}. "
        "Remove them, or set prepare.leaks=warn to accept a test that is not fair"
    )
    if leaks == "error":
        for pair in pairs[:20]:
            print(f"duplicate: {pair['b']['split']}[{pair['b']['index']}] = {pair['a']['split']}[{pair['a']['index']}]")
        raise DataError(text)
    print(f"warning: {text}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(run_step("prepare", prepare, sys.argv[1:]))
