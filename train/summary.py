"""What training says of itself at its end: `summary.json`, and one line for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from train.group import Group
from train.state import Progress
from train.trainer import Trainer


def summarise(trainer: Trainer, group: Group, progress: Progress, first_step: int, seconds: float) -> dict[str, Any]:
    """`seconds` and the speed are of this process's own steps, not of those before a resume."""
    epochs = (progress.step - first_step) / trainer.order.steps_per_epoch
    return {
        "steps": progress.step,
        "epochs": progress.step // trainer.order.steps_per_epoch,
        "best_step": progress.best_step,
        "best_validation": dict(progress.best_validation),
        "stopped_early": progress.step < trainer.total_steps,
        "world_size": group.size,
        "batch_size": trainer.order.batch_size,
        "precision": trainer.config.precision,
        **trainer.strategy.objective.precision.told(),
        "device": group.device.type,
        "seconds": seconds,
        "checkpoints": trainer.pauses.count,
        "checkpoint_seconds": trainer.pauses.seconds,
        "samples_per_second": epochs * trainer.order.samples / seconds,
    }


def last_line(summary: Mapping[str, Any]) -> str:
    told = (
        f"{summary['steps']} steps in batches of {summary['batch_size']}, "
        f"{summary['samples_per_second']:,.0f} samples/s; best at step {summary['best_step']}"
    )
    if "overflow_steps" not in summary:
        return told
    steps = "1 step" if summary["overflow_steps"] == 1 else f"{summary['overflow_steps']} steps"
    return f"{told}; {steps} skipped for overflow, loss scale {summary['loss_scale']:g}"
