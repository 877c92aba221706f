"""Axes beside the batch: texts of every length through a small model with a mask."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from export.axes import axes_of, check_free, example, sizes_of, variants
from export.convert import tensor_specs
from export.parity import require_equal, verify, verify_variants
from export.proof import check_positions, prove
from pipeline.spec.data import open_split
from pipeline.spec.errors import PipelineError, StageError
from pipeline.spec.sections import Export
from pipeline.spec.signature import TensorSpec

from .conftest import COUNT, Exporter, Small

LENGTH = 6
NAMES = ("input_ids", "attention_mask")


def texts(net: nn.Module, length: int = 6) -> Any:
    return Texts(net, columns(length))


class Bag(nn.Module):
    """A mean over what is no padding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(10, 4), nn.Linear(4, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        weight = attention_mask.float().unsqueeze(-1)
        mean = (self.embedding(input_ids) * weight).sum(1) / weight.sum(1).clamp(min=1)
        found: Tensor = self.head(mean)
        return found


class Folded(Bag):
    """Knows one length alone."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return super().forward(input_ids.reshape(-1, LENGTH), attention_mask)


class Stepped(Bag):
    """Answers otherwise from a length on that the test data do not reach; the exporter follows one branch alone."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        scale = 1.0 if input_ids.shape[1] < 2 * LENGTH else 3.0
        return super().forward(input_ids, attention_mask) * scale


@dataclass
class Texts(Small):
    inputs: tuple[str, ...] = NAMES
    axes: dict[str, tuple[str, ...]] = field(default_factory=lambda: dict.fromkeys(NAMES, ("batch", "sequence")))
    longest: dict[str, int] = field(default_factory=lambda: {"sequence": 40})


def columns(length: int = LENGTH) -> dict[str, np.ndarray[Any, Any]]:
    ids = np.arange(COUNT * length).reshape(COUNT, length) % 10
    return {
        "input_ids": ids,
        "attention_mask": (np.arange(length) < 2 + np.arange(COUNT)[:, None] % 5).astype(np.int64),
    }


def test_texts_of_lengths_never_traced_with_and_without_padding_equal_torch(exported: Exporter) -> None:
    made = exported(texts(Bag()))
    inputs, outputs = tensor_specs(made.path)
    assert [spec.shape for spec in inputs] == [("batch", "sequence")] * 2
    assert outputs[0].shape == ("batch", 3)
    check_free(inputs, made.task)
    found = verify_variants(made.task, made.model, made.test, made.path, made.config)
    require_equal(found, made.config)
    places = {one["worst"].partition(" at ")[2] for one in found}
    lengths = {int(place.partition("sequence ")[2].partition(",")[0]) for place in places}
    assert lengths == {40, 1, 2, 3, 5, 7}
    assert {place.rpartition(" ")[2] for place in places} == {"none", "left", "right"}
    assert {one["batch_size"] for one in found} == {1, 2, 5}


def test_a_model_that_is_another_at_a_length_the_data_do_not_have_is_refused(exported: Exporter) -> None:
    made = exported(Texts(Stepped(), columns()))
    require_equal(verify(made.task, made.model, made.test, made.path, made.config), made.config)  # the data say nothing
    found = verify_variants(made.task, made.model, made.test, made.path, made.config)
    with pytest.raises(StageError, match=r"elements differ beyond .*at sequence 40, padding: \w+"):
        require_equal(found, made.config)


def test_a_model_for_one_length_alone_is_refused(exported: Exporter) -> None:
    with pytest.raises(StageError, match=r"does not export to ONNX|axis `sequence` of `input_ids` became"):
        check_free(tensor_specs(exported(texts(Folded())).path)[0], texts(Folded()))


def test_an_axis_that_became_fixed_in_the_file_is_named() -> None:
    spec = TensorSpec(name="input_ids", datatype="INT64", shape=("batch", 6))
    with pytest.raises(StageError, match="axis `sequence` of `input_ids` became 6 in the export"):
        check_free((spec,), texts(Bag()))


@pytest.mark.parametrize("length", [2, 3, 4, 5])
def test_the_batch_that_is_traced_is_as_large_as_no_other_axis(length: int) -> None:
    task = texts(Bag(), length)
    sizes = sizes_of(task, example(task, open_split(task, "test")))
    assert sizes["sequence"] == length != sizes["batch"] >= 2


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"axes": {"ids": ("batch",)}}, "`axes` names ids, which is no input of the task"),
        (
            {"axes": {"input_ids": ("sequence", "batch")}},
            "`axes` of input_ids: write the names of its axes, `batch` first",
        ),
        ({"axes": {"input_ids": ("batch", "x", "x")}}, "`axes` of input_ids"),
        ({"longest": {}}, "`longest` must say how long each of sequence may be"),
        ({"longest": {"sequence": 4}}, "an axis 6 long, beyond the 4 that `longest` allows"),
        ({"columns": columns(1)}, "axis `sequence` of `input_ids` is 1 long in the test data"),
        (
            {"columns": {**columns(), "attention_mask": np.ones((COUNT, 5))}},
            "axis `sequence` is 5 long in `attention_mask`, and 6 in another input",
        ),
        (
            {"axes": {"input_ids": ("batch", "a"), "attention_mask": ("batch", "b")}, "longest": {"a": 9, "b": 9}},
            "axes of different names have one size in the test data",
        ),
    ],
)
def test_axes_that_cannot_be_are_told(changed: dict[str, Any], message: str) -> None:
    task = texts(Bag())
    for name, value in changed.items():
        setattr(task, name, value)
    with pytest.raises(PipelineError) as caught:
        list(variants(task, open_split(task, "test")))
    assert message in str(caught.value)


def test_a_task_without_axes_has_none_but_its_batch() -> None:
    task: Any = Small(nn.Identity(), {"x": np.ones((COUNT, 2))})
    assert axes_of(task) == {}
    assert len(example(task, open_split(task, "test"))["x"]) == 3


def test_a_limit_beyond_the_models_own_configuration_is_refused() -> None:
    net: Any = Bag()
    net.config = type("Config", (), {"max_position_embeddings": 39})()
    with pytest.raises(StageError, match=r"`longest` allows 40 for axis `sequence`, but .* ends at 39"):
        check_positions(texts(net), net)


class Windowed(Bag):
    """Takes no text shorter than its window, in torch neither."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        scale = attention_mask.float().unfold(1, 3, 1).mean(dim=(1, 2))
        return super().forward(input_ids, attention_mask) * scale[:, None]


@pytest.mark.long
def test_lengths_that_torch_itself_refuses_are_told_and_not_compared(
    exported: Exporter, capsys: pytest.CaptureFixture[str]
) -> None:
    made = exported(Texts(Windowed(), columns()))
    found = verify_variants(made.task, made.model, made.test, made.path, made.config)
    require_equal(found, made.config)
    assert not [one for one in found if " 1, padding" in one["worst"] or " 2, padding" in one["worst"]]
    said = capsys.readouterr().out
    assert "not compared at sequence 1, padding: none: torch itself refuses it" in said


class Stubborn(Bag):
    """Never leaves training mode."""

    def train(self, mode: bool = True) -> Stubborn:
        super().train(True)
        return self


def test_a_part_that_stays_in_training_mode_is_named(tmp_path: Any) -> None:
    task: Any = Texts(nn.Sequential(Stubborn()), columns())
    with pytest.raises(StageError, match=r"0, 0\.embedding, 0\.head: still in training mode after eval"):
        prove(task, task.net, open_split(task, "test"), Export(), tmp_path / "model.onnx")


def test_a_router_with_noise_is_named(tmp_path: Any) -> None:
    class Noisy(Bag):
        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            found = super().forward(input_ids, attention_mask)
            return found + torch.rand_like(found)

    task: Any = Texts(Noisy(), columns())
    proven = prove(task, task.net, open_split(task, "test"), Export(), tmp_path / "model.onnx")
    with pytest.raises(StageError, match=r"torch answers `y` differently each time .*noise in a router"):
        proven.require()
