from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pipeline.spec.data import Samples
from pipeline.spec.sections import Train
from train.trial import Trial

CPU = torch.device("cpu")


class Wide:
    inputs = ("x",)
    outputs = ("y",)
    poison: Exception | None = None

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 1))

    def data(self, split: str) -> dict[str, Any]:
        return {"x": np.ones((64, 256), np.float32)}

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        if self.poison is not None:
            raise self.poison
        return outputs.square().mean()

    def metrics(self, outputs: Tensor, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {}


def trial(task: Wide, **train: Any) -> Trial:
    return Trial(task, Train(**train), Samples("train", task.data("train")), CPU)  # type: ignore[arg-type]


def test_the_estimate_is_the_same_every_time_and_grows_by_what_a_sample_keeps() -> None:
    first, second = trial(Wide()), trial(Wide())
    found = [first.needed_bytes(size) for size in (2, 4, 8, 32)]
    assert found == [second.needed_bytes(size) for size in (2, 4, 8, 32)]
    steps = [(found[i] - found[i - 1]) / gap for i, gap in ((1, 2), (2, 4), (3, 24))]
    assert steps[0] > 4 * (256 + 512)
    assert steps == pytest.approx([steps[0]] * 3, rel=1e-3)


def test_an_optimizer_with_less_state_needs_less() -> None:
    assert trial(Wide(), optimizer="sgd").needed_bytes(2) < trial(Wide(), optimizer="adamw").needed_bytes(2)


def test_the_model_is_the_one_that_will_be_trained() -> None:
    """What begins with pretrained weights is not built by the task's model()."""
    task, model = Wide(), nn.Linear(256, 3)
    samples = Samples("train", task.data("train"))
    assert Trial(task, Train(), samples, CPU, lambda: model).model is model  # type: ignore[arg-type]


def test_a_step_is_timed() -> None:
    seconds = trial(Wide()).seconds(8, passes=2)
    assert seconds is not None
    assert seconds > 0


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes")],
)
def test_want_of_memory_is_an_answer(error: Exception) -> None:
    task = Wide()
    made = trial(task)
    task.poison = error
    assert made.seconds(8, passes=1) is None
    assert not made.fits(8, budget=1 << 40)


def test_any_other_mistake_is_the_tasks_own() -> None:
    task = Wide()
    made = trial(task)
    task.poison = RuntimeError("mat1 and mat2 shapes cannot be multiplied")
    with pytest.raises(RuntimeError, match="mat1"):
        made.fits(8, budget=1 << 40)
