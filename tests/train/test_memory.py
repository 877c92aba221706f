from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from pipeline.spec.rank import Rank
from train.group import Group
from train.memory import Saved, budget_bytes, free_bytes, held_bytes, predicted
from train.optimizer import make_optimizer

ALONE = Group(Rank(), torch.device("cpu"))


def container(folder: Path, limit: str) -> Path:
    for name, text in {"max": limit, "current": "70", "stat": "anon 50\ninactive_file 20"}.items():
        (folder / f"memory.{name}").write_text(text)
    return folder


def test_a_container_with_a_limit_has_no_more_than_that_but_may_drop_its_file_caches(tmp_path: Path) -> None:
    assert free_bytes(container(tmp_path, "100")) == 100 - 70 + 20
    assert free_bytes(container(tmp_path, "10")) == 0
    assert free_bytes(container(tmp_path, "max")) > 1 << 20


def test_a_budget_is_what_was_named_or_else_a_part_of_what_is_free() -> None:
    assert budget_bytes(3, ALONE) == 3 << 20
    assert 0 < budget_bytes(0, ALONE) < 1.2 * free_bytes()


def test_what_autograd_keeps_grows_by_the_sample_and_weights_are_not_counted() -> None:
    model = nn.Sequential(nn.Linear(100, 50), nn.Tanh(), nn.Linear(50, 10))
    found = {}
    for size in (4, 8, 64):
        saved = Saved(model)
        with saved.counting():
            model(torch.zeros(size, 100)).sum()
        found[size] = saved.bytes
    per_sample = 4 * (100 + 50)  # the input, and the answer of tanh, which the next layer needs too
    assert found == {size: size * per_sample for size in found}
    assert predicted({4: found[4], 8: found[8]}, 64) == found[64]


def test_weights_gradients_and_the_two_moments_of_adam_are_held() -> None:
    model = nn.Linear(100, 10)
    optimizer = make_optimizer(model, "adamw", 0.0)
    torch.autograd.backward(model(torch.ones(2, 100)).sum())
    optimizer.step()
    assert held_bytes(model, optimizer) == pytest.approx(4 * 4 * 1010, abs=32)  # and a counter for each parameter
