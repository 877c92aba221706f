from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from pipeline.contract.errors import ConfigError
from tests.train.distributed import run_distributed
from train.batch_order import BatchOrder
from train.process_group import ProcessGroup
from train.trainer import batch_sizes_differ, check_compiler, mark_batch_dynamic

from .conftest import Project, equal, weights
from .test_trainer import Line, config, trainer

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
        check_compiler(torch.device(device))


def test_training_without_a_compiler_stops_before_its_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ConfigError, match="compile=false"):
        trainer(Line(), config(compile=True))


def graphs(group: ProcessGroup) -> int:
    """How many are made for batches of 5, cut in two."""
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
def test_compiled_training_matches_and_resumes_bit_for_bit(
    project: Project,
) -> None:
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
    """How many are made for texts that are padded to several lengths; the first batch is of one size on both axes."""
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


def test_padded_batches_of_all_lengths_take_one_graph() -> None:
    assert run_distributed(padded_graphs, 1, True) == [1]
    assert run_distributed(padded_graphs, 1, False) == [2]
