"""The user's own training made small: what `pipe chaos` overrides, as a pure function of configuration and data."""

from __future__ import annotations

from pipeline.chaos.schedule import FEWEST_STEPS, step_ends
from pipeline.spec.config import Config, override_config
from pipeline.spec.errors import ConfigError

_EPOCHS = 2  # the fewest that have an end in their midst
_BATCH_SIZE = 64  # in place of `auto`, which may find another one each time
_NEVER_TIRED = 1000  # restarts in a row: kills at one place come often without a new checkpoint


def small(config: Config, samples: int, kills: int, words: list[str]) -> Config:
    """A checkpoint at every step, and as many steps as there are kills at a step's end; `words` come last."""
    train = config.train
    batch_size = _BATCH_SIZE if train.batch_size == "auto" else train.batch_size
    per_epoch = max(FEWEST_STEPS, step_ends(kills)) // _EPOCHS
    wanted = per_epoch * batch_size - (batch_size > 1)  # so that batches differ in size
    epochs = _EPOCHS if wanted <= samples else -(-_EPOCHS * per_epoch * batch_size // samples)
    found = override_config(
        config,
        [
            f"train.batch_size={batch_size}",
            f"train.samples={wanted if wanted < samples else 0}",
            f"train.epochs={max(_EPOCHS, epochs)}",
            f"train.restarts={_NEVER_TIRED}",
            "train.checkpoint_every=1",
            "train.checkpoints=",
            "train.log_every=1",
            "train.nodes=1",
            "train.rendezvous=",
            "train.patience=0",
            "train.trace=false",
            "train.balance=equal",
            "train.deterministic=true",
            *words,
        ],
    )
    _check_comparable(found)
    return found


def _check_comparable(config: Config) -> None:
    """Two trainings that nobody disturbs have to end with the same bits."""
    train = config.train
    if train.sync == "parameter_server":
        raise ConfigError(
            "pipe chaos compares weights to the bit, and with train.sync=parameter_server they depend on who is "
            "faster; add train.sync=allreduce"
        )
    if train.balance == "auto" or not train.deterministic:
        raise ConfigError(
            "pipe chaos compares weights to the bit: leave train.balance=equal and train.deterministic=true"
        )
