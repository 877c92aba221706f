from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from pipeline.contract.settings.stages import Train
from pipeline.system.errors import ConfigError
from tests.train.distributed import run_distributed
from train.batch_order import BatchOrder
from train.device.compilation import batch_sizes_differ, check_compiler, keep_compile_cache, mark_batch_dynamic
from train.parallel.blocks import compile_blocks
from train.process_group import ProcessGroup

from .conftest import Project, equal, weights
from .test_trainer import Line, config, trainer
from .test_trainer import weights as weights_of

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")


def test_sizes_differ_unless_batches_and_slices_divide() -> None:
    assert not batch_sizes_differ(BatchOrder(samples=64, batch_size=8, seed=0), cuts=2)
    assert batch_sizes_differ(BatchOrder(samples=64, batch_size=8, seed=0), cuts=3)
    assert batch_sizes_differ(BatchOrder(samples=65, batch_size=8, seed=0), cuts=1)
    assert batch_sizes_differ(BatchOrder(samples=60, batch_size=8, seed=0), cuts=1)  # 8 batches: 7.5 samples each


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_missing_compiler_is_reported_at_once(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ConfigError, match=r"train\.compile=true: no compiler \(.+\) on " + device):
        check_compiler(Train(compile=True), torch.device(device))


def test_training_without_a_compiler_stops_before_its_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ConfigError, match="compile=false"):
        trainer(Line(), config(compile=True))


def graphs(group: ProcessGroup) -> int:
    """Return how many graphs are compiled for batches of 5, cut in two."""
    counters.clear()
    made = trainer(Line(), config(compile=True, accumulate=2))
    assert {len(job.indices) for step in range(3) for job in made._requests(step)} == {2, 3}
    for step in range(3):
        made._step(step)
    found: int = counters["stats"]["unique_graphs"]
    return found


@needs_compiler
@pytest.mark.long
def test_batches_of_all_sizes_take_one_graph() -> None:
    """In a separate process: the compiler imports setuptools, which depends on earlier imports."""
    assert run_distributed(graphs, 1) == [1]


@pytest.mark.long
@needs_compiler
def test_compiled_training_matches_and_resumes_bit_for_bit(project: Project) -> None:
    """Batches of 7 and 8 for two processes and two micro-batches; the cut run goes on with another size first."""
    plain = project.run("plain", accumulate=2, epochs=2)
    whole, split_by_speed = (
        project.run(name, accumulate=2, epochs=2, compile=True, checkpoint_every=1) for name in "wc"
    )
    for run in (plain, whole):
        done = project.train(run, processes=2)
        assert done.returncode == 0, done.stderr
    for name, tensor in weights(plain).items():
        torch.testing.assert_close(weights(whole)[name], tensor, rtol=1e-4, atol=1e-5)
    shutil.copytree(whole.partial("train"), split_by_speed.partial("train"))
    for later in sorted((split_by_speed.partial("train") / "checkpoints").glob("step-*"))[1:]:
        shutil.rmtree(later)
    done = project.train(split_by_speed, processes=2)
    assert "resumed from the checkpoint" in done.stdout, done.stderr
    assert equal(weights(split_by_speed), weights(whole))


def padded_graphs(group: ProcessGroup, any_length: bool) -> int:
    """Return how many graphs are compiled for texts padded to several lengths; the first batch is square."""
    made: list[object] = []

    def backend(graph: torch.fx.GraphModule, _inputs: object) -> Callable[..., Any]:
        made.append(graph)
        return graph.forward

    compiled = torch.compile(lambda ids: (ids * 2).sum(dim=1), backend=backend)
    for shape in ((4, 4), (4, 7), (3, 9)):
        batch = {"ids": torch.ones(shape)}
        mark_batch_dynamic(batch, any_length)
        assert compiled(batch["ids"]).tolist() == [2 * shape[1]] * shape[0]
    return len(made)


@pytest.mark.long
def test_padded_batches_of_all_lengths_take_one_graph() -> None:
    assert run_distributed(padded_graphs, 1, True) == [1]
    assert run_distributed(padded_graphs, 1, False) == [2]


class Block(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return x + scale * torch.tanh(self.linear(x))


def block_graphs(group: ProcessGroup, any_size: bool) -> tuple[int, int]:
    """Return how many graphs are compiled for twelve equal blocks, and how many more in validation and other sizes."""
    made: list[object] = []

    def backend(graph: torch.fx.GraphModule, _inputs: object) -> Callable[..., Any]:
        made.append(graph)
        return graph.forward

    plain_compile = torch.compile
    torch.compile = partial(plain_compile, backend=backend)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(*[Block() for _ in range(12)]))
    x, names = torch.randn(6, 4), list(model.state_dict())
    expected = model(x)
    compile_blocks(model, any_size)
    assert list(model.state_dict()) == names
    assert torch.equal(model(x), expected)
    in_training = len(made)
    model(x[:5])
    model.eval()(x[:3])
    return in_training, len(made) - in_training


def test_equal_blocks_are_compiled_once_and_validation_not_at_all() -> None:
    assert run_distributed(block_graphs, 1, True) == [(1, 0)]
    assert run_distributed(block_graphs, 1, False) == [(1, 1)]


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"compile=blocks: the model has no repeated blocks.*set train\.compile=true"):
        compile_blocks(nn.Sequential(nn.Linear(2, 2), nn.Tanh()), any_size=False)


@needs_compiler
@pytest.mark.long
def test_compiled_blocks_train_the_same_also_when_computed_again() -> None:
    assert run_distributed(block_losses, 1) == [True]


def block_losses(group: ProcessGroup) -> bool:
    made = [trainer(Deep(), config(**train)) for train in ({}, {"compile": "blocks", "recompute": "blocks"})]
    for step in range(4):
        for one in made:
            one._step(step)
    plain, compiled = (weights_of(one) for one in made)
    return plain == pytest.approx(compiled, abs=1e-5)


class Deep(Line):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Sequential(*[Block(2) for _ in range(3)]), nn.Linear(2, 1))


def test_the_compile_cache_is_in_the_users_cache_unless_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "elsewhere")
    keep_compile_cache()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "elsewhere"
    assert not list(tmp_path.iterdir())
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    keep_compile_cache()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "pipe" / "compile")
    assert (tmp_path / "pipe" / "compile").is_dir()
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    keep_compile_cache()
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ
