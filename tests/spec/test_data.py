from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from pipeline.spec.data import Samples, bare, check_columns, forward, named
from pipeline.spec.errors import DataError
from pipeline.spec.task import Task


class Items(Dataset[Any]):
    def __init__(self, *items: Any) -> None:
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> Any:
        return self._items[index]


class Stream(IterableDataset[Any]):
    """Has no length and no order, so no sample could be counted exactly once."""

    def __iter__(self) -> Iterator[Any]:
        return iter(())


class Names:
    """Only what `named` reads of a task."""

    inputs = ("x",)

    def __init__(self, *outputs: str) -> None:
        self.outputs = outputs


def task(*outputs: str) -> Task:
    return Names(*outputs)  # type: ignore[return-value]


def test_columns_are_read_at_any_indices_in_the_order_asked() -> None:
    samples = Samples("train", {"x": np.arange(10), "y": np.arange(10) * 2.0})
    batch = samples.batch([7, 0, 7])
    assert batch["x"].tolist() == [7, 0, 7]
    assert batch["y"].tolist() == [14.0, 0.0, 14.0]
    assert samples.in_memory


def test_a_data_set_gives_the_batches_that_columns_give() -> None:
    columns: dict[str, Any] = {"x": np.arange(12, dtype=np.float32).reshape(4, 3), "label": np.arange(4)}
    items = Items(*({name: column[i] for name, column in columns.items()} for i in range(4)))
    left, right = Samples("test", columns), Samples("test", items)
    assert not right.in_memory
    for indices in ([0, 3, 1], range(4)):
        for name, column in left.batch(indices).items():
            assert torch.equal(column, right.batch(indices)[name])
            assert column.dtype == right.batch(indices)[name].dtype


def test_batches_cover_a_range_in_order_with_a_smaller_last_one() -> None:
    samples = Samples("test", {"x": np.arange(10)})
    assert [batch["x"].tolist() for batch in samples.batches(range(2, 9), 3)] == [[2, 3, 4], [5, 6, 7], [8]]


def test_columns_of_unequal_length_are_refused_with_their_lengths() -> None:
    with pytest.raises(DataError, match=r"columns differ in length \(x 3, y 2\)"):
        Samples("train", {"x": np.zeros(3), "y": np.zeros(2)})


@pytest.mark.parametrize("source", [{"x": np.zeros((0, 4))}, Items()])
def test_an_empty_split_is_refused_by_name(source: Any) -> None:
    with pytest.raises(DataError, match=r"data\('validation'\): the split is empty"):
        Samples("validation", source)


def test_a_split_without_columns_is_refused() -> None:
    with pytest.raises(DataError, match="has no columns"):
        Samples("train", {})


@pytest.mark.parametrize("column", [["a", "b"], 3, None, [[1, 2], [3]], np.array(["x", "y"])])
def test_a_column_that_is_no_array_of_numbers_is_named(column: Any) -> None:
    with pytest.raises(DataError, match=r"data\('train'\): column `bad`"):
        Samples("train", {"x": np.zeros(2), "bad": column})


@pytest.mark.parametrize("source", [None, 5, Stream()])
def test_a_source_that_cannot_be_counted_is_refused(source: Any) -> None:
    with pytest.raises(DataError, match="columns of equal length, or a map-style data set"):
        Samples("train", source)


@pytest.mark.parametrize("item", [3, (torch.zeros(2), 1)])
def test_an_item_that_is_no_mapping_is_refused(item: Any) -> None:
    with pytest.raises(DataError, match="must be a mapping of column names"):
        Samples("train", Items(item, item)).batch([0, 1])


def test_an_item_with_a_value_that_is_no_number_names_the_column() -> None:
    with pytest.raises(DataError, match="column `path`"):
        Samples("train", Items({"x": 1.0, "path": "a.png"})).batch([0])


def test_an_input_that_is_no_column_is_named_with_those_there_are() -> None:
    with pytest.raises(DataError, match=r"no column x, which the task names as an input \(columns: image\)"):
        check_columns(task("y"), Samples("train", {"image": np.zeros(2)}))


def test_one_declared_output_reaches_the_loss_as_a_bare_tensor() -> None:
    found = forward(nn.Identity(), task("y"), {"x": torch.ones(2), "label": torch.zeros(2)})
    assert isinstance(found, Tensor)


@pytest.mark.parametrize("returned", [(torch.zeros(1), torch.ones(1)), [torch.zeros(1), torch.ones(1)]])
def test_several_outputs_take_the_declared_names_in_order(returned: Any) -> None:
    found = named(task("a", "b"), returned)
    assert {name: float(tensor) for name, tensor in found.items()} == {"a": 0.0, "b": 1.0}
    assert bare(task("a", "b"), found) is found


def test_a_mapping_is_read_by_name_and_in_declared_order() -> None:
    found = named(task("a", "b"), {"b": torch.ones(1), "other": torch.ones(9), "a": torch.zeros(1)})
    assert list(found) == ["a", "b"]
    assert float(found["b"]) == 1.0


@pytest.mark.parametrize(
    "returned",
    [torch.zeros(1), (torch.zeros(1),), (torch.zeros(1), None), {"a": torch.zeros(1)}, (torch.zeros(1),) * 3, None, 3],
)
def test_an_answer_that_does_not_hold_the_declared_outputs_is_refused(returned: Any) -> None:
    with pytest.raises(DataError, match=r"named in `outputs` \(a, b\)"):
        named(task("a", "b"), returned)


def test_a_split_can_be_cut_to_its_first_samples_whether_in_memory_or_not() -> None:
    columns = Samples("train", {"x": np.arange(5)})
    items = Samples("train", Items(*({"x": i} for i in range(5))))
    for samples in (columns, items):
        cut = samples.first(3)
        assert (len(cut), cut.in_memory) == (3, samples.in_memory)
        assert cut.batch([2, 0])["x"].tolist() == [2, 0]
        assert samples.first(0) is samples
        assert samples.first(9) is samples
