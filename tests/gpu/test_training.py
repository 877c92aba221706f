from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.contract.data import Samples
from pipeline.contract.processes import Rank
from train.data import Feed, Job
from train.optim import Precision
from train.parallel.base import Objective, Part, Strategy
from train.parallel.ddp import DataParallel
from train.process_group import Group
from train.state import Progress

from .conftest import Waves, losses, make

pytestmark = pytest.mark.gpu


def test_a_gpu_trains_what_a_cpu_trains(group: Group) -> None:
    """Without dropout, which draws from the device's own generator."""
    on_gpu, on_cpu = make(group), make(Group(Rank(), torch.device("cpu")), device="cpu")
    for made in (on_gpu, on_cpu):
        made.strategy.model.eval()
    assert losses(on_gpu, range(30)) == pytest.approx(losses(on_cpu, range(30)), rel=1e-3)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_follows_full_precision(group: Group, precision: str) -> None:
    full, half = losses(make(group), range(40)), losses(make(group, precision=precision), range(40))
    assert half[-1] < full[0] / 2
    assert half == pytest.approx(full, rel=0.3, abs=0.1)  # fp16 may skip a step at first


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler uses what torch deprecates
@pytest.mark.skipif(not (shutil.which("gcc") or shutil.which("clang")), reason="no C compiler for Triton")
def test_compiled_training_follows_plain_training(group: Group) -> None:
    plain, compiled = make(group), make(group, compile=True)
    for made in (plain, compiled):
        made.strategy.module.eval()
    assert losses(compiled, range(20)) == pytest.approx(losses(plain, range(20)), rel=1e-3)


def test_the_same_seed_trains_the_same_bits_with_dropout(group: Group) -> None:
    first, second, other = (losses(make(group, seed=seed), range(20)) for seed in (1, 1, 2))
    assert first == second != other


def test_a_resumed_run_ends_with_the_bits_of_the_uninterrupted_one(group: Group, tmp_path: Path) -> None:
    pytest.importorskip("safetensors", reason="checkpoints are safetensors files")
    from train.checkpoint.store import CheckpointStore

    whole = make(group, checkpoint_every=7)
    whole.fit(Progress(), CheckpointStore(tmp_path, 99, {}), None)
    store = CheckpointStore(tmp_path, 99, {})
    saved, cut = store.load(7), make(group, checkpoint_every=7)
    cut.restore(saved)
    cut.fit(saved.progress, store, None)
    expected, found = whole.strategy.model.state_dict(), cut.strategy.model.state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_host_waits_for_nothing_in_a_step(group: Group, precision: str) -> None:
    made = make(group, precision=precision)
    losses(made, range(3))
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(3, 8):
            made._step(step)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_memory_does_not_grow_from_step_to_step(group: Group) -> None:
    made = make(group)
    losses(made, range(10))
    before = torch.cuda.memory_allocated()
    losses(made, range(10, 40))
    assert torch.cuda.memory_allocated() <= before + 4096


@pytest.mark.parametrize("accumulate", [1, 3])
def test_ddp_over_nccl_leaves_the_gradient_of_one_process(group: Group, tmp_path: Path, accumulate: int) -> None:
    meeting = f"file://{tmp_path}/meeting"
    dist.init_process_group("nccl", init_method=meeting, rank=0, world_size=1, device_id=group.device)
    try:
        found = [gradient(kind, group, accumulate) for kind in (Strategy, DataParallel)]
    finally:
        dist.destroy_process_group()
    for left, right in zip(*found, strict=True):
        torch.testing.assert_close(left, right)


def gradient(kind: type[Strategy], group: Group, accumulate: int) -> list[Tensor]:
    config = make(group).config
    task: Any = Waves()
    torch.manual_seed(0)
    model = task.model().eval()
    strategy = kind(model, Objective(task, Precision("fp32", group.device)), group, config)
    strategy.module.eval()
    columns = {name: torch.as_tensor(column).cuda() for name, column in task.data("train").items()}
    cuts = [20 * i // accumulate for i in range(accumulate + 1)]
    slices = [slice(*cuts[i : i + 2]) for i in range(accumulate)]
    parts = [
        Part(
            {name: column[cut] for name, column in columns.items()},
            cut.stop - cut.start,
            (cut.stop - cut.start) / 20,
            cut.stop == 20,
        )
        for cut in slices
    ]
    strategy.backward(parts)
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("share", [0.2, 0.0])
def test_columns_are_fed_to_the_gpu_from_there_or_from_pinned_memory(
    group: Group, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    monkeypatch.setattr("train.data._GPU_SHARE", share)
    columns = Waves().data("train")
    feed = Feed(Samples("train", columns), group, seed=0, workers=0)
    indices = make(group).order.batch(3)
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = feed.fetch(Job(3, 0, indices))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert found["x"].device == group.device
    assert torch.equal(found["x"].cpu(), torch.from_numpy(columns["x"])[indices])


def test_workers_feed_the_gpu_the_same_batches(group: Group) -> None:
    columns = {name: torch.as_tensor(column) for name, column in Waves().data("train").items()}
    items = Samples("train", torch.utils.data.StackDataset(**columns))  # type: ignore[arg-type]
    jobs = [Job(step, 0, make(group).order.batch(step)) for step in range(4)]
    feed = Feed(items, group, seed=0, workers=2)
    feed.start(jobs)
    for job in jobs:
        found = feed.fetch(job)
        assert found["x"].device == group.device
        assert torch.equal(found["x"].cpu(), columns["x"][job.indices])
    feed.stop()
