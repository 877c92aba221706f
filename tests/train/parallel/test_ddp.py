from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from train.parallel.ddp import DataParallel, Rewinding, only_statistics
from train.process_group import Group

from ..together import together, trainer, weights


def test_running_statistics_go_back_to_where_they_were() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    moment = Rewinding(model)
    for _ in range(2):
        model(torch.randn(8, 2))
        before = {name: buffer.clone() for name, buffer in model.named_buffers()}
        moment.note()
        model(torch.randn(8, 2))
        assert any(not torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
        moment.rewind()
        for name, buffer in model.named_buffers():
            assert torch.equal(buffer, before[name]), name


STEPS = 4
CASES: dict[str, dict[str, Any]] = {
    "one bucket": {},
    "several": {"bucket_mb": 0.0005},
    "several, and the same parameters in every step": {"bucket_mb": 0.0005, "static_graph": True},
    "micro-batches": {"accumulate": 3},
    "micro-batches, and the same parameters in every step": {"accumulate": 3, "static_graph": True},
    "several with micro-batches": {"accumulate": 3, "bucket_mb": 0.0005, "static_graph": True},
}


def test_buckets_and_static_graphs_change_how_gradients_travel_and_not_what_arrives() -> None:
    """32 · 3 + 16 · 32 numbers and more in five layers: a bucket of 500 bytes holds few of them."""
    found, other = together(runs, 2)
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


def runs(group: Group) -> dict[str, tuple[dict[str, Tensor], list[int], int]]:
    """Weights after some steps, the sizes of the buckets in bytes, and the bytes that were sent."""
    found = {}
    for case, words in CASES.items():
        made = trainer(group, **words)
        assert isinstance(made.strategy, DataParallel)
        for step in range(STEPS):
            made._step(step)
        ddp: Any = made.strategy.ddp  # published without types
        sizes = str(ddp._get_ddp_logging_data()["rebuilt_bucket_sizes"])
        found[case] = (weights(made), [int(size) for size in sizes.split(",")], made.strategy.traffic.sent_bytes)
    return found


def test_buffers_that_a_training_pass_reads_are_told_from_running_statistics() -> None:
    norms = nn.Sequential(nn.BatchNorm1d(3), nn.InstanceNorm1d(3, track_running_stats=True), nn.Linear(3, 3))
    assert only_statistics(norms)
    norms[2].register_buffer("mask", torch.ones(3))
    assert not only_statistics(norms)
