from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pipeline.contract.config import Config, parse_config
from pipeline.contract.data import Samples
from pipeline.contract.settings.stages import Train
from pipeline.system.errors import ConfigError, DataError
from pipeline.system.processes import Rank
from train.batch_order import BatchOrder, count_steps
from train.checkpoint.store import CheckpointStore
from train.optim import make_optimizer
from train.process_group import ProcessGroup
from train.state import Progress
from train.trainer import CheckpointPauses, Trainer, update_best

CPU = ProcessGroup(Rank(), torch.device("cpu"))


class Line:
    """Fits y = x · w on 20 samples; counts how often each sample is loaded."""

    inputs = ("x",)
    outputs = ("y",)

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.poison: dict[int, float] = {}  # number of the call of loss() → value added to its result
        self.calls = 0

    def model(self) -> nn.Module:
        return nn.Linear(2, 1)

    def data(self, split: str) -> dict[str, Any]:
        x = np.random.default_rng(0).normal(size=(20, 2)).astype(np.float32)
        return {"x": x, "y": x.sum(axis=1, keepdims=True), "index": np.arange(20)}

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        if torch.is_grad_enabled():
            self.seen += batch["index"].tolist()
            self.calls += 1
        return nn.functional.mse_loss(outputs, batch["y"]) + self.poison.get(self.calls, 0.0)

    def metrics(self, outputs: Tensor, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"closeness": -(outputs - batch["y"]).abs()[:, 0]}


def config(**train: Any) -> Config:
    values = {"epochs": 4, "batch_size": 6, "lr": 0.05, "device": "cpu", **train}
    return parse_config({"name": "x", "task": "t.py:T", "codec": "c.py:C", "train": values}, source="test")


def trainer(task: Line, settings: Config) -> Trainer:
    splits = Samples("train", task.data("train")), Samples("validation", task.data("v"))
    assert settings.train.batch_size != "auto"
    return Trainer(task, settings, CPU, *splits, settings.train.batch_size)  # type: ignore[arg-type]


def fit(directory: Path, task: Line, **train: Any) -> tuple[Trainer, Progress]:
    made = trainer(task, config(**train))
    return made, made.fit(Progress(), CheckpointStore(directory, 2, {}), None)


def weights(made: Trainer) -> list[float]:
    return [value for tensor in made.strategy.model.state_dict().values() for value in tensor.flatten().tolist()]


def validation_loss(progress: Progress) -> float:
    assert progress.best_loss is not None
    return progress.best_loss


def test_every_sample_is_used_once_per_epoch_in_order(tmp_path: Path) -> None:
    task = Line()
    made, progress = fit(tmp_path, task, epochs=2)
    planned = [int(i) for step in range(progress.step) for i in made.order.batch(step)]
    assert task.seen == planned
    assert sorted(planned) == sorted([*range(20), *range(20)])


def test_micro_batches_give_the_gradient_of_the_whole_batch(tmp_path: Path) -> None:
    found = [weights(fit(tmp_path / str(parts), Line(), accumulate=parts)[0]) for parts in (1, 3, 5, 100)]
    for other in found[1:]:
        assert other == pytest.approx(found[0], abs=1e-6)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_gradient_is_clipped_to_the_norm(tmp_path: Path, precision: str) -> None:
    """A step of SGD is as long as the learning rate times the norm, whatever the loss scale."""
    plain = {"optimizer": "sgd", "momentum": 0, "weight_decay": 0, "schedule": "constant", "warmup_ratio": 0}
    made = trainer(Line(), config(**plain, max_steps=1, clip_norm=0.01, precision=precision))
    before, scaler = torch.tensor(weights(made)), made._precision.scaler
    scaler.load_state_dict({**scaler.state_dict(), "scale": 128.0})  # so low that nothing overflows
    made.fit(Progress(), CheckpointStore(tmp_path, 2, {}), None)
    assert float((torch.tensor(weights(made)) - before).norm()) == pytest.approx(0.05 * 0.01, rel=0.01)


@pytest.mark.parametrize("start", [0, 5])
def test_every_step_has_the_learning_rate_of_the_schedule(tmp_path: Path, start: int) -> None:
    made = trainer(Line(), config(epochs=2, schedule="linear", warmup_ratio=0.25))
    rates: list[float] = []
    made._optimizer.register_step_post_hook(lambda *_: rates.append(made._optimizer.param_groups[0]["lr"]))
    made.fit(Progress(step=start), CheckpointStore(tmp_path, 2, {}), None)
    assert rates == pytest.approx([0.025, 0.05, 0.05, 0.05 * 5 / 6, 0.05 * 4 / 6, 0.05 / 2, 0.05 / 3, 0.05 / 6][start:])


def test_the_same_seed_trains_the_same_weights_and_another_seed_others(tmp_path: Path) -> None:
    found = [weights(fit(tmp_path / str(i), Line(), seed=seed)[0]) for i, seed in enumerate((7, 7, 8))]
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_reaches_a_similar_loss(tmp_path: Path, precision: str) -> None:
    full = validation_loss(fit(tmp_path / "fp32", Line(), epochs=20)[1])
    half = validation_loss(fit(tmp_path / precision, Line(), epochs=20, precision=precision)[1])
    assert half == pytest.approx(full, abs=0.02)
    assert half < 0.2


def test_fp16_overflow_skips_the_step_and_lowers_the_scale(tmp_path: Path) -> None:
    made = trainer(Line(), config(precision="fp16"))
    scaler = made._precision.scaler
    scaler.load_state_dict({**scaler.state_dict(), "scale": 2.0**127})  # the scaled loss is infinite at once
    progress = made.fit(Progress(), CheckpointStore(tmp_path, 2, {}), None)
    assert progress.step == made.total_steps
    assert scaler.get_scale() < 2.0**127
    assert all(map(math.isfinite, weights(made)))


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("log_every", [1, 10])
def test_nonfinite_loss_with_finite_gradient_stops_training(
    tmp_path: Path, value: float, precision: str, log_every: int
) -> None:
    task = Line()
    task.poison[7] = value
    with pytest.raises(DataError, match="the loss is not finite at step 7 on rank 0"):
        fit(tmp_path, task, precision=precision, log_every=log_every)
    assert CheckpointStore(tmp_path, 2, {}).steps() == [4]


def test_nonfinite_gradient_stops_before_the_update(tmp_path: Path) -> None:
    made = trainer(Line(), config())
    before = weights(made)
    made.strategy.model.register_parameter("extra", nn.Parameter(torch.zeros(1)))
    hook: Any = made.strategy.model.get_parameter("weight").register_hook  # published without types
    hook(lambda gradient: gradient * math.inf)
    with pytest.raises(DataError, match="the gradient is not finite at step 1 on rank 0"):
        made.fit(Progress(), CheckpointStore(tmp_path, 2, {}), None)
    assert weights(made)[: len(before)] == before


def test_early_stopping_after_patience_epochs(tmp_path: Path) -> None:
    made, progress = fit(
        tmp_path, Line(), epochs=50, early_stopping_patience=2, lr=1e-30
    )  # a rate too small for float32 to move
    assert progress.step == 3 * made.order.steps_per_epoch
    assert progress.best_step == made.order.steps_per_epoch


def test_training_does_not_continue_after_early_stopping(tmp_path: Path) -> None:
    made, progress = fit(tmp_path, Line(), epochs=50, early_stopping_patience=2, lr=1e-30)
    assert made.fit(progress, CheckpointStore(tmp_path, 2, {}), None) == progress


def test_training_ends_within_an_epoch_after_max_steps(tmp_path: Path) -> None:
    made, progress = fit(tmp_path, Line(), max_steps=6)  # of 4 steps per epoch
    assert progress.step == made.total_steps == 6
    assert progress.best_step in (4, 6)
    assert CheckpointStore(tmp_path, 2, {}).steps() == [4, 6], "the last step is validated and saved"


def test_validation_within_an_epoch_can_find_the_best_weights(tmp_path: Path) -> None:
    task = Line()
    made = trainer(task, config(validate_every=3, epochs=2, checkpoint_every=0))
    lines: list[int] = []

    class Log:
        def record(self, step: int, epoch: int, values: dict[str, Any]) -> None:
            lines.extend([step] * ("validation" in values))

    log: Any = Log()
    progress = made.fit(Progress(), CheckpointStore(tmp_path, 9, {}), log)
    assert lines == CheckpointStore(tmp_path, 9, {}).steps() == [3, 4, 6, 8]
    assert progress.best_step in lines


def test_patience_counts_validations(tmp_path: Path) -> None:
    _, progress = fit(tmp_path, Line(), epochs=50, early_stopping_patience=2, validate_every=1, lr=1e-30)
    assert progress.step == 3


@pytest.mark.parametrize(
    ("limits", "steps"),
    [
        ({}, 40),  # 10 epochs of 4 steps
        ({"max_steps": 7}, 7),
        ({"max_steps": 70}, 40),
        ({"max_tokens": 1}, 1),
        ({"max_tokens": 20 * 8}, 4),  # an epoch has 20 samples of 8 tokens
        ({"max_tokens": 20 * 8 + 1}, 5),
        ({"max_tokens": 30 * 8, "max_steps": 5}, 5),
        ({"max_tokens": 30 * 8}, 6),
    ],
)
def test_training_ends_at_the_first_of_its_limits(limits: dict[str, int], steps: int) -> None:
    settings = config(epochs=10, **limits).train
    assert count_steps(settings, BatchOrder(20, 6, 0), tokens_per_sample=8) == steps


def test_token_budget_needs_rows_of_token_ids() -> None:
    with pytest.raises(ConfigError, match="max_tokens=100 needs a column `input_ids`"):
        trainer(Line(), config(max_tokens=100))


def test_a_better_epoch_becomes_the_best_and_patience_starts_anew() -> None:
    found = update_best(Progress(step=20, best_step=10, best_loss=0.5, stale_epochs=3), {"loss": 0.4, "accuracy": 0.9})
    assert found == Progress(20, 20, 0.4, {"loss": 0.4, "accuracy": 0.9}, 0)


@pytest.mark.parametrize("loss", [0.5, 0.6])
def test_an_epoch_without_gain_keeps_the_best_and_is_counted(loss: float) -> None:
    before = Progress(step=20, best_step=10, best_loss=0.5, best_validation={"loss": 0.5}, stale_epochs=1)
    assert update_best(before, {"loss": loss}) == Progress(20, 10, 0.5, {"loss": 0.5}, 2)


@pytest.mark.parametrize(
    ("loss", "best", "stale", "lost"),
    [(0.25, 20, 3, True), (0.35, 10, 3, True), (0.2, 20, 3, True), (0.1, 20, 0, False)],
)
def test_patience_compares_with_a_best_that_was_lost(loss: float, best: int, stale: int, lost: bool) -> None:
    before = Progress(20, 10, 0.3, {"loss": 0.3}, 2, lost_best={"step": 5, "loss": 0.2})
    after = update_best(before, {"loss": loss})
    assert (after.best_step, after.stale_epochs, after.lost_best is not None) == (best, stale, lost)


def test_first_epoch_is_the_best_so_far() -> None:
    assert update_best(Progress(step=5), {"loss": 1e9}).best_step == 5


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_biases_and_norms_do_not_decay_and_frozen_weights_are_left_out(kind: str) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    model[2].requires_grad_(False)
    decayed, plain = make_optimizer(model, Train.model_validate({"optimizer": kind, "weight_decay": 0.3})).param_groups
    assert [tuple(parameter.shape) for parameter in decayed["params"]] == [(3, 2)]
    assert [tuple(parameter.shape) for parameter in plain["params"]] == [(3,), (3,), (3,)]
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.3, 0.0)


def test_checkpoint_pauses_are_averaged_per_line_and_summed() -> None:
    pauses = CheckpointPauses()
    assert pauses.metrics() == {}
    for _ in range(2):
        with pauses.measured():
            time.sleep(0.02)
    received = pauses.metrics()["checkpoint_seconds"]
    assert received >= 0.02
    assert pauses.seconds == pytest.approx(2 * received)
    assert (pauses.count, pauses.metrics()) == (2, {})
