"""Weights cut over processes, trained by real ones."""

from __future__ import annotations

import pytest
import torch

from train.batch_order import Order

from ..conftest import Project, equal, failure, weights
from .conftest import assert_close, losses, resumed, script, trained, weights_after

DEEP = "nn.Tanh(), nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8), nn.Dropout(DROP)"

TIED = """
def tied(first, activation, last):
    inner, outer = nn.Linear(8, 8), nn.Linear(8, 8)
    outer.weight = inner.weight
    return nn.Sequential(first, inner, activation, outer, last)


class Tiny:"""


def test_fsdp_trains_the_weights_that_one_process_does(project: Project) -> None:
    """Slices of 2 and 3 samples in three micro-batches: some passes are there only for the others' sake."""
    project.replace("nn.Tanh()", DEEP.replace("DROP", "0.0"))
    words = {"accumulate": 3, "epochs": 2}
    assert_close(trained(project, "three", 3, parallel="fsdp", **words), trained(project, "one", 1, **words))


def test_an_fsdp_run_that_was_cut_goes_on_bit_for_bit_and_its_checkpoint_fits_ddp(project: Project) -> None:
    words = {"checkpoint_every": 7, "keep_checkpoints": 9}
    project.replace("nn.Tanh()", DEEP.replace("DROP", "0.2"))
    whole = trained(project, "whole", 2, parallel="fsdp", **words)
    assert equal(weights(resumed(project, whole, "cut", 7, 2, parallel="fsdp", **words)), weights(whole))
    assert_close(resumed(project, whole, "ddp", 7, 2, **words), whole)


def test_fsdp_in_bf16_follows_fp32_and_running_statistics_survive(project: Project) -> None:
    project.replace("nn.Tanh()", "nn.BatchNorm1d(8), nn.Tanh()")
    half = trained(project, "half", 2, parallel="fsdp", precision="bf16", epochs=2)
    full = trained(project, "full", 2, epochs=2)
    assert losses(half) == pytest.approx(losses(full), rel=0.1)
    variance = [weights_after(run, 10)["weights.1.running_var"] for run in (half, full)]
    torch.testing.assert_close(variance[0], variance[1], rtol=0.05, atol=0.01)  # of the same type, too


def test_an_overflow_on_one_rank_skips_the_step_on_all(project: Project) -> None:
    """Sample 5 weighs so much that its gradient does not fit into fp16."""
    project.replace(
        'nn.functional.mse_loss(outputs, batch["target"])',
        '((outputs - batch["target"]) ** 2 * torch.where(batch["index"][:, None] == 5, 1e4, 1e-2)).mean()',
    )
    words = {"epochs": 1, "checkpoint_every": 1, "keep_checkpoints": 9, "precision": "fp16", "clip_norm": 0}
    run = trained(project, "run", 2, parallel="fsdp", **words)
    heavy = next(step for step in range(5) if 5 in Order(37, 8, 0).batch(step))
    for step in range(2, 6):
        kept = equal(weights_after(run, step), weights_after(run, step - 1))
        assert kept == (step - 1 == heavy), f"step {step - 1}"


COUNT = """
import os, sys
from pathlib import Path
import torch
from pipeline.contract.processes import Rank
from pipeline.contract.settings.stages import Train
from pipeline.contract.task import load_task
from train.process_group import Group
from train.parallel.base import Objective
from train.optim import make_optimizer
from train.optim import Precision
from train.parallel import Part, make_strategy

config = Train(device="cpu", parallel="fsdp")
torch.distributed.init_process_group("gloo")
group = Group(Rank.from_env(), torch.device("cpu"))
task = load_task("task.py:Tiny", Path.cwd())
strategy = make_strategy(task.model(), Objective(task, Precision("fp32", group.device)), group, config)
optimizer = make_optimizer(strategy.model, "adamw", 0.0)
batch = {name: torch.as_tensor(column)[:4] for name, column in task.data("train").items()}
strategy.backward([Part(batch, 4, 0.5, True)])
optimizer.step()
def held(tensor):
    local = getattr(tensor, "_local_tensor", tensor)
    return local.numel() * local.element_size()
kept = [p for p in strategy.model.parameters()]
kept += [p.grad for p in kept] + [t for state in optimizer.state.values() for t in state.values() if t.ndim]
found = group.gather(sum(held(tensor) for tensor in kept))
if group.rank.first:
    print("held", *found)
sys.stdout.flush()
os._exit(0)
"""


def test_each_of_n_fsdp_processes_holds_an_nth_of_weights_gradients_and_optimizer(project: Project) -> None:
    project.replace("nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)", "nn.Linear(3, 48), nn.Tanh(), nn.Linear(48, 48)")
    whole = 4 * 4 * (3 * 48 + 48 + 48 * 48 + 48)  # weight, gradient and two moments, four bytes each
    assert script(project, COUNT, processes=2).split() == ["held", str(whole // 2), str(whole // 2)]


def test_a_weight_that_two_blocks_share_is_refused(project: Project) -> None:
    project.replace("        return nn.Sequential(", "        return tied(")
    project.replace("class Tiny:", TIED)
    run = project.run(parallel="fsdp")
    assert project.train(run, processes=2).returncode != 0
    assert "is shared by two blocks" in str(failure(run))
