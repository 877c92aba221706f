"""Comparison of samples with and without padding, whatever the mask is called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from export.checks.cases import evaluated_outputs
from export.checks.verify import write_and_compare
from export.conversion.padding import PaddingEffect, measure_padding
from export.conversion.shapes import untraced_batches
from pipeline.contract.data import open_split
from pipeline.contract.settings.stages import Export

from .conftest import COUNT, open_model
from .recurrent import LENGTH, LONGEST, Tagger, Tags, texts

PADDED = sum(length < LENGTH for length in 3 + np.arange(COUNT) % (LENGTH - 2))
AXES = {"tags": ("batch", "time", 3)}


class Mean(Tagger):
    """Ignores padding, on either side."""

    def forward(self, letters: Tensor, real: Tensor) -> Tensor:
        weight = real.float().unsqueeze(-1)
        found: Tensor = (self.embed(letters) * weight).sum(1) / weight.sum(1).clamp(min=1)
        return found


def effect(task: Any) -> PaddingEffect:
    compute = partial(evaluated_outputs, task, task.net.eval())
    return measure_padding(task, compute, open_split(task, "test").collated(), AXES, Export())


def test_recurrent_layer_that_reads_padding_is_reported_with_numbers(tmp_path: Path) -> None:
    task: Any = Tags()
    test = open_split(task, "test")
    config = Export(batch_sizes=(1, 7))
    report = write_and_compare(open_model(task, tmp_path / "model.onnx", config))
    report.require(config)
    found = PaddingEffect(**report.last_check.record["padding"])
    assert (found.samples, found.differing, found.unknown) == (PADDED, PADDED, {})
    assert found.padding == {"time": "letters 0, real 0 on the right"}
    index = int(found.worst.rpartition(" ")[2])
    with torch.no_grad():
        sample = [column[index : index + 1] for column in test.batch(range(COUNT)).values()]
        length = int(sample[1].sum())
        own, padded = task.net(*(column[:, :length] for column in sample)), task.net(*sample)
    assert found.max_abs_error == pytest.approx(float((own - padded[:, :length]).abs().max()), rel=1e-4)
    assert found.max_abs_error > 0.05
    assert report.last_check.padding == found.text
    assert found.text.startswith(
        f"padding changes answers: {PADDED} of {PADDED} padded test samples have other outputs"
    )


def test_model_that_ignores_padding_has_no_effect() -> None:
    found = effect(Tags(Mean()))
    assert (found.samples, found.differing, found.text) == (PADDED, 0, "")


class Scaled(nn.Module):
    def __init__(self, net: nn.Module, unit: float) -> None:
        super().__init__()
        self.net, self.unit = net, unit

    def forward(self, letters: Tensor, real: Tensor) -> Tensor:
        scaled: Tensor = self.net(letters, real) * self.unit
        return scaled


@pytest.mark.parametrize("unit", [1e-6, 1e6])
def test_unit_of_the_outputs_does_not_matter(unit: float) -> None:
    assert effect(Tags(Scaled(Tagger(), unit))).differing == PADDED
    assert effect(Tags(Scaled(Mean(), unit))).differing == 0


def test_samples_torch_cannot_compute_alone_are_counted() -> None:
    class Window(Mean):
        def forward(self, letters: Tensor, real: Tensor) -> Tensor:
            if letters.shape[1] < 5:
                raise RuntimeError("kernel size (5) is larger than the input")
            return super().forward(letters, real)

    found = effect(Tags(Window()))
    short = int((3 + np.arange(COUNT) % (LENGTH - 2) < 5).sum())
    assert (found.samples, found.differing) == (PADDED - short, 0)
    assert found.unknown == {
        "time": f"torch cannot compute {short} of {PADDED} padded test samples by themselves "
        "(RuntimeError: kernel size (5) is larger than the input)"
    }


def flipped() -> dict[str, np.ndarray[Any, Any]]:
    return {name: column[:, ::-1].copy() for name, column in texts().items()}


def test_left_padding_is_detected() -> None:
    assert effect(Tags(Mean(), flipped())).padding == {"time": "letters 0, real 0 on the left"}
    assert effect(Tags(columns=flipped())).differing == PADDED


def test_other_lengths_are_compared_with_the_padding_of_the_data() -> None:
    task: Any = Tags()
    batches = list(untraced_batches(task, open_split(task, "test")))
    assert {batch.padding for batch in batches} == {"none", "right"}
    padded = next(batch for batch in batches if batch.padding == "right" and batch.sizes["time"] == LONGEST)
    for name in ("letters", "real"):
        assert not padded.batch[name][::2, -(LONGEST // 3) :].any()


def test_position_inputs_are_not_taken_for_padding() -> None:
    class Placed(Mean):
        def forward(self, letters: Tensor, real: Tensor, place: Tensor | None = None) -> Tensor:
            assert place is not None
            return super().forward(letters, real * (place < LONGEST))

    columns = {**texts(), "place": np.tile(np.arange(LENGTH), (COUNT, 1))}
    axes = dict.fromkeys(columns, ("batch", "time"))
    found = effect(Tags(Placed(), columns, tuple(columns), axes=axes))
    assert (found.padding, found.samples, found.differing) == ({"time": "letters 0, real 0 on the right"}, PADDED, 0)


def test_mask_alone_identifies_padding() -> None:
    columns = {**texts(), "noise": np.random.default_rng(1).integers(1, 9, (COUNT, LENGTH))}
    axes = dict.fromkeys(columns, ("batch", "time"))

    class Noisy(Mean):
        def forward(self, letters: Tensor, real: Tensor, noise: Tensor | None = None) -> Tensor:
            assert noise is not None
            return super().forward(letters, real) + noise.sum(1, keepdim=True)

    found = effect(Tags(Noisy(), columns, tuple(columns), axes=axes))
    assert found.padding == {"time": "real 0 on the right"}
    assert (found.samples, found.differing) == (PADDED, PADDED)


NOT_CLEAR = "the test samples show none"


def test_axes_with_the_same_unknown_reason_share_a_sentence() -> None:
    text = PaddingEffect(unknown={"past": NOT_CLEAR, "future": NOT_CLEAR, "time": "it fails"}).text
    assert text == (
        "whether padding of `past` and `future` changes answers is unknown: the test samples show none; "
        "whether padding of `time` changes answers is unknown: it fails"
    )


@pytest.mark.parametrize(
    "letters",
    [
        np.random.default_rng(2).integers(0, 12, (COUNT, LENGTH)),  # no padding
        np.full((COUNT, LENGTH), 3),  # the same everywhere
        np.random.default_rng(2).integers(1, 11, (COUNT, LENGTH))
        * (np.arange(LENGTH) < LENGTH - 1),  # an end-of-text token
        np.where(np.arange(LENGTH) == 1, 0, texts()["letters"]),  # padding inside as well
    ],
)
def test_padding_is_unknown_if_the_data_show_none(letters: Any) -> None:
    class Sum(Tagger):
        def forward(self, letters: Tensor, real: Tensor | None = None) -> Tensor:
            found: Tensor = self.embed(letters).sum(1)
            return found

    task = Tags(Sum(), {"letters": letters}, ("letters",), axes={"letters": ("batch", "time")})
    found = effect(task)
    assert (found.samples, found.differing, set(found.unknown)) == (0, 0, {"time"})
    assert found.text.startswith("whether padding of `time` changes answers is unknown: ")


@pytest.mark.parametrize(
    ("end", "is_clear"), [([], True), ([0.5, 0.5], False), ([0.7], False), ([np.nan, np.nan], False)]
)
def test_data_with_distinct_ends_are_not_padded(end: Any, is_clear: bool) -> None:
    class Total(Tagger):
        def forward(self, letters: Tensor, real: Tensor | None = None) -> Tensor:
            return letters.sum(dim=1, keepdim=True)

    curves = np.random.default_rng(3).normal(size=(COUNT, LENGTH, 1)).astype(np.float32)
    curves[:2, LENGTH - len(end) :, 0] = end
    task = Tags(Total(), {"letters": curves}, ("letters",), axes={"letters": ("batch", "time", 1)})
    assert (effect(task) == PaddingEffect()) is is_clear


@dataclass
class Collated(Tags):
    """Texts of their own lengths, which collate() pads with the letter 1, and no mask."""

    inputs: tuple[str, ...] = ("letters",)

    def data(self, split: str) -> Any:
        columns = texts()
        lengths = columns["real"].sum(1)
        return [{"letters": row[:length]} for row, length in zip(columns["letters"], lengths, strict=True)]

    def collate(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        rows = [torch.as_tensor(sample["letters"]) for sample in samples]
        return {"letters": nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=1)}


def test_collate_defines_a_sample_by_itself() -> None:
    class Unmasked(Tagger):
        def forward(self, letters: Tensor, real: Tensor | None = None) -> Tensor:
            return super().forward(letters, torch.ones_like(letters))

    found = effect(Collated(Unmasked(), axes={"letters": ("batch", "time")}))
    assert found.padding == {"time": "collate() on the right"}
    assert (found.samples, found.differing) == (PADDED, PADDED)


def test_output_that_is_longer_without_padding_is_not_compared() -> None:
    class Shorter(Tagger):
        def forward(self, letters: Tensor, real: Tensor) -> Tensor:
            return super().forward(letters, real)[:, : 2 * LENGTH - 2 * letters.shape[1] + 1]

    found = effect(Tags(Shorter()))
    assert "`tags` is [3, 3] for a sample by itself, [1, 3] if padded" in found.unknown["time"]


def test_task_with_only_a_batch_axis_has_no_padding() -> None:
    assert effect(Tags(axes={"letters": ("batch", LENGTH)}, longest={})) == PaddingEffect()
