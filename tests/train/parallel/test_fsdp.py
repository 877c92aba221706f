"""FSDP, trained by real processes."""

from __future__ import annotations

import pytest
import torch

from train.batch_order import BatchOrder

from ..conftest import Project, equal, weights
from .conftest import assert_close, losses, resumed, script, trained, weights_after

DEEP = "nn.Tanh(), nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8), nn.Dropout(DROP)"


def test_fsdp_trains_the_weights_of_one_process(project: Project) -> None:
    """Slices of 2 and 3 samples in three micro-batches: some passes only gather weights for the others."""
    project.replace("nn.Tanh()", DEEP.replace("DROP", "0.0"))
    settings = {"accumulate": 3, "epochs": 2}
    assert_close(trained(project, "three", 3, strategy="fsdp", **settings), trained(project, "one", 1, **settings))


@pytest.mark.long  # test_together.py resumes one
def test_interrupted_run_resumes_bit_for_bit_and_with_ddp(project: Project) -> None:
    settings = {"checkpoint_every": 7, "keep_checkpoints": 9}
    project.replace("nn.Tanh()", DEEP.replace("DROP", "0.2"))
    whole = trained(project, "whole", 2, strategy="fsdp", **settings)
    assert equal(weights(resumed(project, whole, "resumed", 7, 2, strategy="fsdp", **settings)), weights(whole))
    assert_close(resumed(project, whole, "ddp", 7, 2, **settings), whole)


@pytest.mark.long
def test_bf16_follows_fp32_and_keeps_running_statistics(project: Project) -> None:
    project.replace("nn.Tanh()", "nn.BatchNorm1d(8), nn.Tanh()")
    half = trained(project, "half", 2, strategy="fsdp", precision="bf16", epochs=2)
    full = trained(project, "full", 2, epochs=2)
    assert losses(half) == pytest.approx(losses(full), rel=0.1)
    variance = [weights_after(run, 10)["weights.1.running_var"] for run in (half, full)]
    torch.testing.assert_close(variance[0], variance[1], rtol=0.05, atol=0.01)  # of the same type, too


def test_overflow_on_one_rank_skips_the_step_on_all(project: Project) -> None:
    """Sample 5 weighs so much that its gradient does not fit into fp16."""
    project.replace(
        'nn.functional.mse_loss(outputs, batch["target"])',
        '((outputs - batch["target"]) ** 2 * torch.where(batch["index"][:, None] == 5, 1e4, 1e-2)).mean()',
    )
    settings = {"epochs": 1, "checkpoint_every": 1, "keep_checkpoints": 9, "precision": "fp16", "clip_norm": 0}
    run = trained(project, "run", 2, strategy="fsdp", **settings)
    heavy = next(step for step in range(5) if 5 in BatchOrder(37, 8, 0).batch(step))
    for step in range(2, 6):
        kept = equal(weights_after(run, step), weights_after(run, step - 1))
        assert kept == (step - 1 == heavy), f"step {step - 1}"


PROGRAM = """
import os, sys
from pathlib import Path
import torch
from pipeline.system.errors import ConfigError
from pipeline.system.processes import Rank
from pipeline.contract.settings.stages import Train
from pipeline.contract.task import load_task
from train.process_group import ProcessGroup
from train.optim import Precision, make_optimizer
from train.parallel import make_strategy
from train.parallel.base import MicroBatch, Objective

config = Train(device="cpu", strategy="fsdp")
torch.distributed.init_process_group("gloo")
group = ProcessGroup(Rank.from_env(), torch.device("cpu"))
task = load_task("task.py:Tiny", Path.cwd())
strategy = make_strategy(task.model(), Objective(task, Precision("fp32", group.device)), group, config)
optimizer = make_optimizer(strategy.model, Train(weight_decay=0))
batch = {name: torch.as_tensor(column)[:4] for name, column in task.data("train").items()}
strategy.compute_gradient([MicroBatch(batch, 4, 0.5, True)])
optimizer.step()
tensors = [p for p in strategy.model.parameters()]
tensors += [p.grad for p in tensors] + [t for state in optimizer.state.values() for t in state.values() if t.ndim]
sizes = group.gather(sum(getattr(tensor, "_local_tensor", tensor).nbytes for tensor in tensors))
inner, outer = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
outer.weight = inner.weight
try:
    make_strategy(torch.nn.Sequential(inner, outer), Objective(task, Precision("fp32", group.device)), group, config)
except ConfigError as error:
    refusal = str(error)
group.gather(None)  # the first process has the store, and must not end before the others are done with it
if group.rank.first:
    print(*sizes)
    print(refusal)
sys.stdout.flush()
os._exit(0)
"""


def test_state_is_sharded_and_shared_weights_are_refused(project: Project) -> None:
    project.replace("nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)", "nn.Linear(3, 48), nn.Tanh(), nn.Linear(48, 48)")
    whole = 4 * 4 * (3 * 48 + 48 + 48 * 48 + 48)  # weight, gradient and two moments, four bytes each
    sizes, refusal = script(project, PROGRAM, processes=2).splitlines()
    assert sizes.split() == [str(whole // 2)] * 2
    assert "is shared by two blocks" in refusal
