from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.contract.run import Run, step_main
from pipeline.data_checks.copies import find_duplicates
from pipeline.steps.prepare import prepare
from pipeline.system.errors import ConfigError, DataError, PipelineError
from pipeline.system.files import digest_file

from ..records import write_run_file

TASK = """
import numpy as np
import torch


class Prepared:
    inputs = ("x",)
    outputs = ("y",)
    classes = ("cat", "dog", "owl")

    def model(self): ...
    def loss(self, outputs, batch): ...
    def metrics(self, outputs, batch): ...
    def predicted(self, outputs): ...

    def actual(self, batch):
        return batch["label"]

    def data(self, split):
        start = {"train": 0, "validation": 10, "test": 20}[split]
        x = np.arange(start, start + 6, dtype=np.float32)[:, None]
        label = np.array([0, 1, 1, 0, 1, 0])
        return {"x": x, "label": label}
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "prepared_task.py").write_text(TASK)
    return tmp_path


def edit(root: Path, old: str, new: str) -> None:
    path = root / "prepared_task.py"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


def new_run(root: Path, **sections: Any) -> Run:
    run = Run(root / "run")
    run.partial("prepare").mkdir(parents=True)
    return write_run_file(run, "prepare", task="prepared_task.py:Prepared", **sections)


def report(run: Run) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run.partial("prepare") / "data.json").read_text())
    return found


def place(split: str, index: int) -> dict[str, Any]:
    return {"split": split, "index": index}


def test_every_split_is_counted_fingerprinted_and_balanced(root: Path) -> None:
    run = new_run(root)
    prepare(run, root)
    splits = report(run)["splits"]
    assert {name: facts["samples"] for name, facts in splits.items()} == {"train": 6, "validation": 6, "test": 6}
    assert len({facts["fingerprint"] for facts in splits.values()}) == 3
    assert splits["train"]["classes"] == {"cat": 3, "dog": 3, "owl": 0}
    assert report(run)["duplicates"] == []


def test_missing_parts_of_a_task_are_recorded_as_none(root: Path) -> None:
    edit(root, '    classes = ("cat", "dog", "owl")\n', "")
    run = new_run(root)
    prepare(run, root)
    assert report(run)["splits"]["test"]["classes"] is None
    assert report(run)["files"] == {}
    assert "order" not in report(run)
    assert not {"files", "order.npy"} & {path.name for path in run.partial("prepare").iterdir()}


def test_sample_in_two_splits_stops_the_pipeline(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit(root, '"test": 20', '"test": 15')  # the last of validation is the first of test
    run = new_run(root, prepare={"copies": "error"})
    assert step_main("prepare", prepare, [str(run.path), "--root", str(root)]) == DataError.exit_code == 2
    assert "test[0] = validation[5]" in capsys.readouterr().err
    assert report(run)["duplicates"] == [{"a": place("validation", 5), "b": place("test", 0)}]


def test_random_splits_are_named_as_the_cause_of_a_leak(root: Path) -> None:
    edit(root, "class Prepared:", "CALLS = []\n\n\nclass Prepared:")
    edit(root, "        x = np.arange(start", "        CALLS.append(split)\n        x = np.arange(start := len(CALLS)")
    with pytest.raises(DataError, match=r"data\('train'\): differs each time it is called, .* a fixed seed"):
        prepare(new_run(root), root)


def test_copy_with_another_label_counts_and_is_a_warning(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit(root, '"test": 20', '"test": 12')
    edit(root, "        return {", '        label = label + (split == "test")\n        return {')
    run = new_run(root)
    prepare(run, root)
    assert "warning: all splits: 4 samples are in more than one split" in capsys.readouterr().err
    assert report(run)["duplicate_count"] == 4


def test_first_duplicates_are_listed_and_all_are_counted(root: Path) -> None:
    edit(root, '"test": 20', '"test": 10')
    edit(root, "start + 6, dtype=np.float32)[:, None]", "start + 150, dtype=np.float32)[:, None] * (split != 'train')")
    edit(root, "np.array([0, 1, 1, 0, 1, 0])", "np.zeros(150, int)")
    run = new_run(root)
    prepare(run, root)
    assert (report(run)["duplicate_count"], len(report(run)["duplicates"])) == (150, 100)


def test_each_duplicate_is_paired_with_its_first_place() -> None:
    assert find_duplicates({"train": ["a", "a", "b"], "test": ["c"]}) == []
    assert find_duplicates({"train": ["a", "a"], "validation": ["b", "a"], "test": ["a", "b"]}) == [
        {"a": place("train", 0), "b": place("validation", 1)},
        {"a": place("train", 0), "b": place("test", 0)},
        {"a": place("validation", 0), "b": place("test", 1)},
    ]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("start + 6, dtype=np.float32)[:, None]", "start, dtype=np.float32)[:, None]", "differ in length"),
        ("        return {", "        x, label = x[:0], label[:0]\n        return {", "the split is empty"),
        ("[0, 1, 1, 0, 1, 0]", "[0, 1, 1, 0, 1, 3]", "label 3 is outside the 3 classes"),
        ("[0, 1, 1, 0, 1, 0]", "[0, 1, 1, 0, 1, -1]", "label -1 is outside the 3 classes"),
        ("[0, 1, 1, 0, 1, 0]", "[0, 1, np.nan, 0, 1, 0]", "labels are float64, not integers, and 1 of 6 are miss"),
        ("[0, 1, 1, 0, 1, 0]", "['cat'] * 6", "column `label` has texts, as 'cat'; a model takes numbers"),
        ('{"x": x', '{"picture": x', "no column x, which the task names as an input"),
    ],
)
def test_data_that_cannot_be_trained_on_are_refused_by_split(root: Path, old: str, new: str, message: str) -> None:
    edit(root, old, new)
    with pytest.raises(DataError, match=message) as caught:
        prepare(new_run(root), root)
    assert "data('train')" in str(caught.value)


FILES = """
    def make_files(self, folder):
        (folder / "words").mkdir()
        (folder / "words" / "list.txt").write_text("one two")

    def use_files(self, folder):
        self.words = (folder / "words" / "list.txt").read_text().split()
        assert not (folder / "stale.txt").exists()
"""


def test_shared_files_are_made_and_recorded_by_digest(root: Path) -> None:
    (root / "prepared_task.py").write_text(TASK.replace("x = np", "assert self.words; x = np") + FILES)
    run = new_run(root)
    (run.partial("prepare") / "files").mkdir()
    (run.partial("prepare") / "files" / "stale.txt").write_text("of an attempt that was interrupted")
    prepare(run, root)
    assert report(run)["files"] == {"words/list.txt": hashlib.sha256(b"one two").hexdigest()}


def test_a_link_among_the_shared_files_is_refused(root: Path) -> None:
    link = '    def make_files(self, folder): (folder / "words").symlink_to("/etc")\n'
    (root / "prepared_task.py").write_text(TASK + link + "    def use_files(self, folder): ...\n")
    with pytest.raises(DataError, match="left words, which is not a plain file"):
        prepare(new_run(root), root)


def test_metrics_where_lower_is_better_are_recorded(root: Path) -> None:
    edit(root, "    inputs =", '    directions = {"mae": "lower"}\n    inputs =')
    run = new_run(root)
    prepare(run, root)
    assert json.loads((run.partial("prepare") / "checks.json").read_text())["lower_is_better"] == ["mae"]


def forget(root: Path) -> None:
    """Drop the modules of the project, so that a changed one is imported again."""
    for name in [name for name, it in sys.modules.items() if (getattr(it, "__file__", "") or "").startswith(str(root))]:
        del sys.modules[name]


def add_method(root: Path, method: str) -> None:
    edit(root, "    def actual(", f"    {method}\n\n    def actual(")


@pytest.mark.parametrize(
    ("kind", "returned", "values"),
    [
        ("weights", "1 + data['label']", [1.0, 2, 2, 1, 2, 1]),
        ("groups", "data['label'].tolist()", [0, 1, 1, 0, 1, 0]),
        ("lengths", "range(6)", [0, 1, 2, 3, 4, 5]),
    ],
)
def test_the_order_of_a_task_is_recorded_with_its_digest(
    root: Path, kind: str, returned: str, values: list[float]
) -> None:
    add_method(root, f"def sample_{kind}(self, data): return {returned}")
    run = new_run(root)
    prepare(run, root)
    written = run.partial("prepare") / "order.npy"
    assert report(run)["order"] == {"kind": kind, "digest": digest_file(written)}
    assert np.load(written).tolist() == values


@pytest.mark.parametrize(
    ("methods", "message"),
    [
        (["weights(self, data): return [1, 2]"], r"sample_weights\(\): must return one number for each of the 6 tr"),
        (["weights(self, data): return np.zeros(6)"], "none below 0 and not all 0"),
        (["weights(self, data): return [1, 1, 1, 1, 1, float('nan')]"], "finite numbers"),
        (["lengths(self, data): return ['a'] * 6"], r"sample_lengths\(\): must return one number"),
        (["groups(self, data): return np.zeros(6)"], r"sample_groups\(\): must return integers"),
        (
            ["lengths(self, data): return range(6)", "groups(self, data): return range(6)"],
            r"the task has sample_groups\(\) and sample_lengths\(\), but only one can be used",
        ),
    ],
)
def test_invalid_order_is_an_error(root: Path, methods: list[str], message: str) -> None:
    for method in methods:
        add_method(root, f"def sample_{method}")
    with pytest.raises(PipelineError, match=message):
        prepare(new_run(root), root)


STREAM = """

class Stream:
    def __init__(self, columns):
        self.columns = columns

    def __iter__(self):
        for i in range(6):
            yield {name: column[i] for name, column in self.columns.items()}
"""


def test_a_stream_is_counted_checked_and_recorded(root: Path) -> None:
    in_memory, streamed = new_run(root), root / "run2"
    prepare(in_memory, root)
    expected = report(in_memory)
    in_memory.path.rename(streamed)
    edit(root, 'return {"x": x, "label": label}', 'return Stream({"x": x, "label": label})')
    path = root / "prepared_task.py"
    path.write_text(path.read_text() + STREAM)
    forget(root)
    run = new_run(root)
    prepare(run, root)
    assert report(run) == {**expected, "order": {"kind": "stream"}}
    add_method(root, "def sample_lengths(self, data): return range(6)")
    forget(root)
    with pytest.raises(ConfigError, match=r"has sample_lengths\(\), but data\('train'\) is a stream"):
        prepare(run, root)


def test_duplicates_are_found_although_their_batches_pad_them_differently(root: Path) -> None:
    """The same two texts are padded to 3 tokens in train and to 2 in the other splits."""
    edit(
        root,
        'return {"x": x, "label": label}',
        'return {"x": [[1], [2, 3]] + [[4, 5, start]] * (start < 10), "label": [0, 1, 1][:3 - (start > 9)]}',
    )
    add_method(
        root,
        "def collate(self, samples):\n"
        "        rows = [torch.tensor(sample['x']) for sample in samples]\n"
        "        return {'x': torch.nn.utils.rnn.pad_sequence(rows, batch_first=True),\n"
        "                'label': torch.tensor([sample['label'] for sample in samples])}",
    )
    run = new_run(root, prepare={"copies": "off"})
    prepare(run, root)
    assert report(run)["duplicate_count"] == 4
    assert report(run)["splits"]["train"]["samples"] == 3
