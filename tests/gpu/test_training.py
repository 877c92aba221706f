from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeline.contract.config import parse_config
from pipeline.contract.data import Samples
from pipeline.system.processes import Rank
from train.data import BatchLoader, LoadRequest
from train.device.memory import estimate_memory
from train.optim import Precision
from train.parallel.base import MicroBatch, Objective, Strategy
from train.parallel.ddp import DDPStrategy
from train.parallel.pipeline_split import Stage, StagePlan, dry_run, units
from train.parallel.placeholder import has_placeholder
from train.process_group import ProcessGroup
from train.state import Progress
from train.trainer import Trainer

from .conftest import Waves, compiles, forbid_waiting, losses, make

pytestmark = pytest.mark.gpu


def test_gpu_trains_what_a_cpu_trains(group: ProcessGroup) -> None:
    """Without dropout, which draws from the device's own generator."""
    on_gpu, on_cpu = make(group), make(ProcessGroup(Rank(), torch.device("cpu")), device="cpu")
    for trainer in (on_gpu, on_cpu):
        trainer.strategy.model.eval()
    assert losses(on_gpu, range(30)) == pytest.approx(losses(on_cpu, range(30)), rel=1e-3)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_follows_full_precision(group: ProcessGroup, precision: str) -> None:
    full, half = losses(make(group), range(40)), losses(make(group, precision=precision), range(40))
    assert half[-1] < full[0] / 2
    assert half == pytest.approx(full, rel=0.3, abs=0.1)  # fp16 may skip a step at first


@compiles
def test_compiled_training_follows_plain_training(group: ProcessGroup) -> None:
    plain, compiled = make(group), make(group, compile=True)
    for trainer in (plain, compiled):
        trainer.strategy.module.eval()
    assert losses(compiled, range(20)) == pytest.approx(losses(plain, range(20)), rel=1e-3)


def test_same_seed_trains_the_same_bits_with_dropout(group: ProcessGroup) -> None:
    first, second, other = (losses(make(group, seed=seed), range(20)) for seed in (1, 1, 2))
    assert first == second != other


def test_interrupted_run_resumes_to_the_same_bits(group: ProcessGroup, tmp_path: Path) -> None:
    pytest.importorskip("safetensors", reason="checkpoints are safetensors files")
    from train.checkpoint.store import CheckpointStore

    whole = make(group, checkpoint_every=7)
    whole.fit(Progress(), CheckpointStore(tmp_path, 99, {}), None)
    store = CheckpointStore(tmp_path, 99, {})
    saved, resuming = store.load(7), make(group, checkpoint_every=7)
    resuming.restore(saved)
    resuming.fit(saved.progress, store, None)
    expected, resumed = whole.strategy.model.state_dict(), resuming.strategy.model.state_dict()
    assert all(torch.equal(resumed[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("settings", [{"precision": "fp32"}, {"precision": "bf16"}, {"accumulate": 2}])
def test_step_does_not_make_the_host_wait(group: ProcessGroup, settings: dict[str, Any]) -> None:
    trainer = make(group, Pictures() if "accumulate" in settings else None, **settings)  # pictures come from the host
    losses(trainer, range(3))
    with forbid_waiting():
        for step in range(3, 8):
            trainer._step(step)


def test_memory_does_not_grow_with_steps(group: ProcessGroup) -> None:
    trainer = make(group)
    losses(trainer, range(10))
    before = torch.cuda.memory_allocated()
    losses(trainer, range(10, 40))
    assert torch.cuda.memory_allocated() <= before + 4096


@pytest.mark.parametrize("accumulate", [1, 3])
def test_ddp_over_nccl_has_the_gradient_of_one_process(group: ProcessGroup, tmp_path: Path, accumulate: int) -> None:
    rendezvous = f"file://{tmp_path}/rendezvous"
    dist.init_process_group("nccl", init_method=rendezvous, rank=0, world_size=1, device_id=group.device)
    try:
        gradients = [gradient(strategy, group, accumulate) for strategy in (Strategy, DDPStrategy)]
    finally:
        dist.destroy_process_group()
    for left, right in zip(*gradients, strict=True):
        torch.testing.assert_close(left, right)


def gradient(strategy_type: type[Strategy], group: ProcessGroup, accumulate: int) -> list[Tensor]:
    config = make(group).config
    task: Any = Waves()
    torch.manual_seed(0)
    model = task.model().eval()
    strategy = strategy_type(model, Objective(task, Precision("fp32", group.device)), group, config)
    columns = {name: torch.as_tensor(column).to(group.device) for name, column in task.data("train").items()}
    cuts = [20 * i // accumulate for i in range(accumulate + 1)]
    slices = [slice(*cuts[i : i + 2]) for i in range(accumulate)]
    micro_batches = [
        MicroBatch(
            {name: column[cut] for name, column in columns.items()},
            cut.stop - cut.start,
            (cut.stop - cut.start) / 20,
            cut.stop == 20,
        )
        for cut in slices
    ]
    strategy.warm_up(lambda: micro_batches)  # wraps the model in DDP
    strategy.module.eval()
    strategy.compute_gradient(micro_batches)
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("fraction", [0.2, 0.0])
def test_columns_are_loaded_from_the_gpu_or_pinned_memory(
    group: ProcessGroup, monkeypatch: pytest.MonkeyPatch, fraction: float
) -> None:
    monkeypatch.setattr("train.data._GPU_MEMORY_SHARE", fraction)
    columns = Waves().data("train")
    loader = BatchLoader(Samples("train", columns), group, seed=0, workers=0)
    indices = make(group).order.batch(3)
    with forbid_waiting():
        batch = loader.fetch(LoadRequest(3, 0, indices)).columns
    assert batch["x"].device == group.device
    assert torch.equal(batch["x"].cpu(), torch.from_numpy(columns["x"])[indices])


def test_workers_load_the_same_batches_onto_the_gpu(group: ProcessGroup) -> None:
    columns = {name: torch.as_tensor(column) for name, column in Waves().data("train").items()}
    items = Samples("train", torch.utils.data.StackDataset(**columns))  # type: ignore[arg-type]
    requests = [LoadRequest(step, 0, make(group).order.batch(step)) for step in range(4)]
    loader = BatchLoader(items, group, seed=0, workers=2)
    loader.start(requests)
    for request in requests:
        batch = loader.fetch(request).columns
        assert batch["x"].device == group.device
        assert torch.equal(batch["x"].cpu(), columns["x"][request.indices])
    loader.stop()


class Pictures(Waves):
    """Loads samples of 64 KiB one by one, with noise; a batch of 20 takes a while to copy."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(1 << 14, 512), nn.Dropout(0.1), nn.Tanh(), nn.Linear(512, 1))

    def data(self, split: str) -> Any:
        return Drawn(super().data(split)["target"])


class Drawn(torch.utils.data.Dataset[dict[str, Any]]):
    def __init__(self, targets: Any) -> None:
        self.targets = targets

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": torch.rand(1 << 14), "target": self.targets[index]}


@pytest.mark.parametrize("workers", [0, 2])
def test_prefetch_trains_the_same_bits(
    group: ProcessGroup, tmp_path: Path, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("safetensors", reason="checkpoints are safetensors files")
    from train.checkpoint.store import CheckpointStore

    trained = []
    for depth in (0, 1, 3):
        monkeypatch.setattr("train.trainer.PREFETCH", depth)
        trainer = make(group, Pictures(), accumulate=2, workers=workers)
        assert trainer._loader.prefetches == (depth > 0)
        started = time.perf_counter()
        steps = trainer.fit(Progress(), CheckpointStore(tmp_path / str(depth), 99, {}), None).step
        torch.cuda.synchronize()
        seconds, waited = (time.perf_counter() - started) / steps, trainer._loader.waited_seconds / steps
        print(f"workers={workers} prefetch={depth}: {1e3 * seconds:.2f} ms a step, {1e3 * waited:.2f} of them waiting")
        trained.append(trainer.strategy.model.state_dict())
    for weights in trained[1:]:
        assert all(torch.equal(weights[name], tensor) for name, tensor in trained[0].items())


def test_prefetched_batches_are_those_of_their_requests(group: ProcessGroup) -> None:
    """Batches are used long after their copy, and their memory is freed at once."""
    samples = Samples("train", Drawn(Waves().data("train")["target"]))
    requests = [LoadRequest(step, 0, make(group).order.batch(step)) for step in range(30)]
    on_cpu = BatchLoader(samples, ProcessGroup(Rank(), torch.device("cpu")), 0, 0)
    expected = [on_cpu.fetch(request).columns["x"].double().sum() for request in requests]
    loader, sums = BatchLoader(samples, group, 0, 0, prefetch=2), []
    matrix = torch.rand(8192, 8192, device=group.device)
    for i, request in enumerate(requests):
        batch = loader.fetch(request).columns
        matrix @ matrix  # keeps the GPU busy before it reads the batch
        sums.append(batch["x"].double().sum())
        del batch
        loader.prefetch(requests[i + 1 :])
    torch.testing.assert_close(torch.stack(sums).cpu(), torch.stack(expected), rtol=1e-9, atol=0)


def test_columns_on_the_gpu_are_not_copied_ahead(group: ProcessGroup) -> None:
    assert not make(group)._loader.prefetches


class Wide(Waves):
    """Has a model of 270 MiB, so that the workspaces of libraries do not matter."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8192), nn.Tanh(), nn.Linear(8192, 8192), nn.Tanh(), nn.Linear(8192, 1))


def test_estimate_of_memory_is_within_15_percent_of_what_the_gpu_allocates(group: ProcessGroup) -> None:
    task: Any = Wide()
    train = {"batch_size": 200, "device": "cuda"}
    values = {"name": "x", "task": "t.py:T", "codec": "c.py:C", "train": train}
    config = parse_config(values, source="test")
    samples = Samples("train", task.data("train"))
    expected = estimate_memory(task, config, group, task.model, samples).bytes
    torch.cuda.reset_peak_memory_stats(group.device)
    before = torch.cuda.memory_allocated(group.device)
    losses(Trainer(task, config, group, samples, samples, 200), range(2))
    measured = torch.cuda.max_memory_allocated(group.device) - before
    print(f"estimate {expected >> 20} MiB, measured {measured >> 20} MiB")
    assert expected == pytest.approx(measured, rel=0.15)


class Masked(nn.Module):
    """Makes a mask and positions on the device of its activations."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        positions, mask = torch.arange(8, device=x.device), torch.ones_like(x).triu() > 0
        for layer in self.layers[1:]:
            x = layer(nn.functional.dropout(x, 0.1, self.training) + positions).masked_fill(mask, 0.5)
        return x


@pytest.mark.parametrize("index", range(2))
def test_pipeline_stage_on_a_gpu_matches_the_whole_model(group: ProcessGroup, index: int) -> None:
    model, x = Masked().to(group.device).eval(), torch.rand(5, 8, device=group.device)
    row = list(units(model))
    with torch.autocast("cuda", torch.bfloat16):
        recorded = dry_run(row, lambda count: model(x[:count]))
        stage = Stage(model, StagePlan(model, row, recorded, ["layers.2"]), recorded, index, group.device)
        stage.check(recorded, lambda: model(x[:2]))
        received = [shape.empty(5, group.device).zero_() for shape in stage.input_shapes]
        model.train()
        result = stage.run(received, 5, lambda: model(x))
    (tensor,) = result if index == 0 else (result,)
    assert (tensor.shape, tensor.device, has_placeholder(tensor)) == ((5, 8), group.device, False)


UNFINISHED = """
import sys, torch, torch.distributed as dist
from train.hang_report import describe_collectives, enable_flight_recorder, unfinished_collectives

enable_flight_recorder()
dist.init_process_group("nccl", store=dist.FileStore(sys.argv[1], 1), rank=0, world_size=1)
tensor = torch.ones(5, device="cuda")
dist.all_reduce(tensor)
torch.cuda.synchronize()
torch.cuda._sleep(2_000_000_000)
dist.all_reduce(tensor)
entries = unfinished_collectives()
print([entry["state"] for entry in entries], describe_collectives(entries))
torch.cuda.synchronize()
dist.destroy_process_group()
"""


def test_nccls_recorder_has_the_unfinished_collective(tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    command = [sys.executable, "-c", UNFINISHED, str(tmp_path / "meet")]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    print(finished.stdout, finished.stderr)
    assert "nccl:all_reduce, no. 2, of [5] Float" in finished.stdout
    assert "completed" not in finished.stdout
