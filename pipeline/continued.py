"""What may change when a run goes on: where and how carefully it trains, never what it computes."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.history import write_run
from pipeline.spec.config import override_config
from pipeline.spec.errors import ConfigError
from pipeline.spec.run import Run

# Words of the train section. Not `checkpoints`, where the run's own are; not `device`, whose arithmetic differs.
WHERE = (
    "processes", "nodes", "rendezvous", "launcher", "image", "workers", "restarts", "timeout_seconds",
    "checkpoint_every", "keep_checkpoints", "snapshot", "snapshot_every", "log_every", "trace", "trace_steps",
)  # fmt: skip


def continue_with(run: Run, words: Sequence[str]) -> Run:
    """The run, with `key=value` words on record; its checkpoints and its keys stay what they were."""
    for word in words:
        key = word.partition("=")[0]
        section, _, name = key.partition(".")
        if section != "jobs" and key not in ("deploy.context", "deploy.namespace") and not _is_where(section, name):
            raise ConfigError(
                f"{key} says what the run computes, and it has computed with another value; a run that goes on may "
                f"change where it trains, by jobs.* and train.{', '.join(WHERE)}; `pipe run {word}` starts a new one"
            )
    if not words:
        return run
    body = run.read()
    override_config(run.config, words)  # a value that is none is refused before it is on record
    changed = {word.partition("=")[0] for word in words}
    kept = [word for word in body.continued if word.partition("=")[0] not in changed]
    write_run(run, body.model_copy(update={"continued": (*kept, *words)}))
    return Run(run.path)


def _is_where(section: str, name: str) -> bool:
    return section == "train" and name in WHERE
