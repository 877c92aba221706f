"""Memory estimates: six configurations measured with torch's profiler, what is counted, and what cannot be traced."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from pipeline.contract.config import Config, parse_config
from pipeline.contract.data import Samples
from pipeline.system.processes import Rank
from pipeline.system.torch_private import VALUE_ERRORS
from train.device.memory import (
    Estimate,
    LiveBytes,
    available_bytes,
    estimate_memory,
    find_fix,
    free_bytes,
    longest_first,
    possible_fixes,
    traced_group,
)
from train.process_group import ProcessGroup
from train.trainer import Trainer

from ...quick import quick
from ..distributed import run_distributed

CPU = torch.device("cpu")
MIB = 1 << 20


class Numbers:
    """Columns of numbers with one target each."""

    inputs = ("x",)
    outputs = ("y",)
    shape: tuple[int, ...] = (256,)
    samples = 512

    def data(self, split: str) -> dict[str, Any]:
        x = np.random.default_rng(len(split)).normal(size=(self.samples, *self.shape)).astype(np.float32)
        return {"x": x, "target": np.arange(self.samples) % 10}

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(outputs.float(), batch["target"])

    def metrics(self, outputs: Tensor, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {}


class Perceptron(Numbers):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(256, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.Tanh(), nn.Linear(2048, 10))


class ConvNet(Numbers):
    shape = (3, 32, 32)
    samples = 128

    def model(self) -> nn.Module:
        layers: list[nn.Module] = []
        for channels, wider in ((3, 32), (32, 64), (64, 64)):
            layers += [nn.Conv2d(channels, wider, 3, padding=1), nn.BatchNorm2d(wider), nn.ReLU()]
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(1024, 10))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (8, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        attention = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attention.transpose(1, 2).flatten(2))
        result: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm2(x))))
        return result


class Stack(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        result: Tensor = self.head(x.mean(1))
        return result


class Transformer(Numbers):
    shape = (64, 256)
    samples = 64

    def model(self) -> nn.Module:
        return Stack(256, 3)


def settings(**train: Any) -> Config:
    values = {"epochs": 1, "device": "cpu", "log_every": 100, **train}
    return parse_config({"name": "x", "task": "t.py:T", "codec": "c.py:C", "train": values}, source="test")


def split(task: Any) -> Samples:
    return Samples("train", task.data("train"))


def estimate(task: Any, config: Config, processes: int = 1) -> Estimate:
    with traced_group(config.train, processes, CPU) as group:
        return estimate_memory(task, config, group, task.model, split(task))


def measure(group: ProcessGroup, task: Any, config: Config) -> int:
    """Return the most bytes that torch's allocator had given out while a trainer was made and made two steps."""
    train = split(task)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        trainer = Trainer(task, config, group, train, train, int(config.train.batch_size))
        for step in range(2):
            trainer._step(step)
    return peak_bytes(profiler)


def peak_bytes(profiler: Any) -> int:
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profiler.export_chrome_trace(file.name)
        events = [event for event in json.loads(Path(file.name).read_text())["traceEvents"] if "args" in event]
    live: dict[int, int] = {}
    total = peak = 0
    for event in sorted(events, key=lambda event: event["ts"]):
        if event["name"] != "[memory]":
            continue
        address, size = event["args"]["Addr"], event["args"]["Bytes"]
        if size > 0:
            live[address] = size
            total += size
        else:  # what an earlier test left may be freed here; it does not count
            total -= live.pop(address, 0)
        peak = max(peak, total)
    return peak


ONE = ProcessGroup(Rank(), CPU)
CONFIGURATIONS: dict[str, tuple[Any, int, dict[str, Any]]] = {  # task, processes, settings of the train section
    "perceptron, adamw": (Perceptron(), 1, {"batch_size": 512}),
    "conv net, sgd": (ConvNet(), 1, {"batch_size": 64, "optimizer": "sgd"}),
    "transformer, bf16": (Transformer(), 1, {"batch_size": 32, "precision": "bf16"}),
    "transformer, bf16, recompute=blocks": (
        Transformer(),
        1,
        {"batch_size": 32, "precision": "bf16", "recompute": "blocks"},
    ),
    "transformer, accumulate=4": (Transformer(), 1, {"batch_size": 32, "accumulate": 4}),
    "transformer, fsdp, 2 processes": (Transformer(), 2, {"batch_size": 64, "strategy": "fsdp"}),
    "transformer, ddp, 2 processes": (Transformer(), 2, {"batch_size": 64}),
}


@pytest.mark.parametrize(
    "name", quick(["perceptron, adamw", "conv net, sgd", "transformer, accumulate=4"], CONFIGURATIONS)
)
def test_estimate_is_within_15_percent_of_what_is_measured(name: str) -> None:
    task, processes, train = CONFIGURATIONS[name]
    config = settings(**train)
    expected = estimate(task, config, processes).bytes
    measured = measure(ONE, task, config) if processes == 1 else max(run_distributed(measure, processes, task, config))
    print(f"{name}: estimate {expected / MIB:.1f} MiB, measured {measured / MIB:.1f} MiB")
    assert measured > 30 * MIB
    assert expected == pytest.approx(measured, rel=0.15)


def test_estimate_consists_of_weights_gradients_optimizer_and_activations() -> None:
    numbers = 256 * 2048 + 2048 + 2048 * 2048 + 2048 + 2048 * 10 + 10
    found = estimate(Perceptron(), settings(batch_size=512))
    assert (found.weights, found.gradients) == (4 * numbers, 4 * numbers)
    assert found.optimizer == pytest.approx(8 * numbers, rel=1e-4)  # and a counter for each parameter
    assert found.bytes == found.weights + found.gradients + found.optimizer + found.activations
    assert estimate(Perceptron(), settings(batch_size=512, optimizer="sgd")).optimizer == 4 * numbers


def test_fsdp_divides_weights_gradients_and_optimizer_state() -> None:
    task, whole = Transformer(), estimate(Transformer(), settings(batch_size=64), 4)
    shards = estimate(task, settings(batch_size=64, strategy="fsdp"), 4)
    for name in ("weights", "gradients", "optimizer"):
        assert getattr(shards, name) == pytest.approx(getattr(whole, name) / 4, rel=0.01)


def test_diloco_counts_its_outer_weights_and_momentum() -> None:
    ddp, diloco = (
        estimate(Perceptron(), settings(batch_size=64, strategy=strategy), 2) for strategy in ("ddp", "diloco")
    )
    assert diloco.optimizer == pytest.approx(ddp.optimizer + 2 * ddp.weights, rel=0.01)


class Huge(Numbers):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(256, 1 << 15), *(nn.Linear(1 << 15, 1 << 15) for _ in range(256)))


def test_model_larger_than_any_memory_is_estimated() -> None:
    assert estimate(Huge(), settings(batch_size=2)).weights > 1 << 40


class Reader(Perceptron):
    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return outputs.mean() if batch["target"].sum().item() else outputs.sum()


def test_loss_that_reads_values_cannot_be_traced() -> None:
    with pytest.raises(VALUE_ERRORS):
        estimate(Reader(), settings(batch_size=8))


class Texts(Numbers):
    """Samples of 1 to 300 numbers."""

    def data(self, split: str) -> Any:
        return [{"x": np.ones(length, np.float32)} for length in range(1, 301)]

    def sample_lengths(self, data: Any) -> list[int]:
        return [len(sample["x"]) for sample in data]


def test_longest_samples_come_first() -> None:
    task: Any = Texts()
    samples = longest_first(task, Samples("train", task.data("train")), 0)
    assert [len(sample["x"]) for sample in samples.load(range(3))] == [300, 299, 298]
    assert len(longest_first(task, Samples("train", task.data("train")), 10).load([0])[0]["x"]) == 10


def test_possible_fixes_begin_with_what_changes_no_result() -> None:
    train = settings(batch_size=16).train
    assert list(possible_fixes(train, 4, CPU)) == [
        *("train.accumulate=2", "train.accumulate=4"),
        *("train.recompute=blocks", "train.precision=bf16", "train.strategy=fsdp"),
    ]


@pytest.mark.long
def test_fix_is_the_first_setting_whose_estimate_fits() -> None:
    config, task = settings(batch_size=32), Transformer()
    needed = estimate(task, config).bytes
    fix = find_fix(config, 1, CPU, needed - 1, lambda changed: estimate(task, changed))
    assert fix is not None
    assert fix["setting"] == "train.accumulate=2"
    assert fix["bytes"] == estimate(task, settings(batch_size=32, accumulate=2)).bytes
    assert find_fix(config, 1, CPU, 1, lambda changed: estimate(task, changed)) is None


def test_resized_storages_are_counted_by_their_new_size() -> None:
    with LiveBytes() as live:
        tensor = torch.zeros(1000)
        assert live.bytes == 4000
        view = tensor[:10]
        assert live.bytes == 4000
        tensor.untyped_storage().resize_(0)
        assert live.bytes == 0
        tensor.untyped_storage().resize_(800)
        assert live.bytes == 800
        del tensor
        assert live.bytes == 800
        del view
    assert (live.bytes, live.peak) == (0, 4000)


def test_optimizer_updates_weights_that_are_counted() -> None:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, fused=True)
    before = model.weight.detach().clone()
    with LiveBytes():
        torch.autograd.backward(model(torch.ones(1, 3)).sum())
        optimizer.step()
    assert torch.equal(model.weight, before - 1)


def container(folder: Path, limit: str) -> Path:
    for name, text in {"max": limit, "current": "70", "stat": "anon 50\ninactive_file 20"}.items():
        (folder / f"memory.{name}").write_text(text)
    return folder


def test_free_memory_respects_the_container_limit(tmp_path: Path) -> None:
    assert free_bytes(container(tmp_path, "100")) == 100 - 70 + 20
    assert free_bytes(container(tmp_path, "10")) == 0
    assert free_bytes(container(tmp_path, "max")) > 1 << 20


def test_processes_share_the_free_memory() -> None:
    assert 0 < available_bytes(CPU, 4) < 1.2 * free_bytes() / 4
