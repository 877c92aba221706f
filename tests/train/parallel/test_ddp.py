from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from train.parallel.ddp import BufferSnapshot, DDPStrategy, has_only_running_statistics
from train.process_group import ProcessGroup

from ..distributed import Wave, run_distributed, trainer, weights


def test_buffer_snapshot_restores_running_statistics() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    snapshot = BufferSnapshot(model)
    for _ in range(2):
        model(torch.randn(8, 2))
        before = {name: buffer.clone() for name, buffer in model.named_buffers()}
        snapshot.take()
        model(torch.randn(8, 2))
        assert any(not torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
        snapshot.restore()
        for name, buffer in model.named_buffers():
            assert torch.equal(buffer, before[name]), name


STEPS = 4
CASES: dict[str, dict[str, Any]] = {
    "one bucket": {},
    "several": {},
    "micro-batches": {"accumulate": 3},
    "several with micro-batches": {"accumulate": 3},
}


@pytest.mark.long
def test_buckets_change_messages_but_not_gradients() -> None:
    """32 · 3 + 16 · 32 numbers and more in five layers: a bucket of 500 bytes holds few of them."""
    found, other = run_distributed(runs, 2)
    numbers = sum(tensor.numel() for name, tensor in found["one bucket"][0].items() if not is_statistic(name))
    for case, (held, buckets, sent) in found.items():
        wanted = found["micro-batches" if "micro" in case else "one bucket"][0]
        for name, tensor in held.items():
            torch.testing.assert_close(tensor, wanted[name], rtol=0, atol=0, msg=f"{case}: {name}")
            if not is_statistic(name):
                assert torch.equal(tensor, other[case][0][name])
        assert (len(buckets) == 1) == ("several" not in case), (case, buckets)
        assert sum(buckets) == sent / STEPS == 4 * numbers, "one exchange a step, however many micro-batches"


def is_statistic(name: str) -> bool:
    return name.rpartition(".")[2] in {"running_mean", "running_var", "num_batches_tracked"}


def runs(group: ProcessGroup) -> dict[str, tuple[dict[str, Tensor], list[int], int]]:
    """Weights after some steps, the sizes of the buckets in bytes, and the bytes that were sent."""
    found = {}
    for case, words in CASES.items():
        DDPStrategy.BUCKET_CAP_MB = 0.0005 if "several" in case else 0
        made = trainer(group, **words)
        assert isinstance(made.strategy, DDPStrategy)
        for step in range(STEPS):
            made._step(step)
        ddp: Any = made.strategy.ddp  # published without types
        sizes = str(ddp._get_ddp_logging_data()["rebuilt_bucket_sizes"])
        found[case] = (weights(made), [int(size) for size in sizes.split(",")], made.strategy.traffic.sent_bytes)
    return found


class Unseeded(Wave):
    def model(self) -> nn.Module:
        torch.seed()
        return super().model()


def starts(group: ProcessGroup) -> list[tuple[int, int, dict[str, Tensor]]]:
    """Return the broadcasts and reductions before the first step of a new and of a resumed run, and the weights."""
    results = []
    for resumes in (False, True):
        with torch.profiler.profile() as profiler:
            made = trainer(group, Unseeded(), resumes=resumes)
        names = [event.name for event in profiler.events() or []]
        results.append((names.count("c10d::broadcast_"), names.count("c10d::allreduce_"), weights(made)))
    return results


def test_weights_are_broadcast_unless_a_checkpoint_replaces_them() -> None:
    results = run_distributed(starts, 2)
    for (broadcasts, reductions, _), (resumed_broadcasts, resumed_reductions, _) in results:
        assert broadcasts > resumed_broadcasts == 0
        assert reductions == resumed_reductions == 1, "gradients are exchanged once, for the order of the buckets"
    new, resumed = ([result[i][2] for result in results] for i in range(2))
    parameters = [name for name in new[0] if not is_statistic(name)]
    assert all(torch.equal(new[0][name], new[1][name]) for name in parameters)
    assert not torch.equal(resumed[0]["0.weight"], resumed[1]["0.weight"])


def test_only_running_statistics_may_differ_between_processes() -> None:
    norms = nn.Sequential(nn.BatchNorm1d(3), nn.InstanceNorm1d(3, track_running_stats=True), nn.Linear(3, 3))
    assert has_only_running_statistics(norms)
    norms[2].register_buffer("mask", torch.ones(3))
    assert not has_only_running_statistics(norms)
