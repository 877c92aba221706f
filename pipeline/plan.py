"""What has to run, and why: every decision here is a pure function of keys, records and files' digests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pipeline.spec.config import Config
from pipeline.spec.digest import digest_mapping
from pipeline.spec.errors import ConfigError
from pipeline.spec.override import FILE as OVERRIDE
from pipeline.spec.run import STEPS, StepRecord
from pipeline.steps import KINDS

SCHEMA = "1"  # of the keys; a new meaning of an old output needs a new number
UNKNOWN = "?"  # an input that does not exist yet

Past = Sequence[tuple[str, StepRecord]]  # (run id, record) of one step, newest first


@dataclass(frozen=True)
class Step:
    """One decision of a plan."""

    name: str
    action: Literal["run", "reuse"]
    reason: str
    key: str
    parts: Mapping[str, str]
    source: str = ""  # run whose outputs are reused


def choose(names: Sequence[str], start: str | None, until: str | None) -> tuple[str, ...]:
    """The steps a command line asks for, in the order of the road."""
    for name in (*names, *(filter(None, (start, until)))):
        if name != "all" and name not in STEPS:
            raise ConfigError(f"no step {name!r}; there are {', '.join(STEPS)}, and all")
    wanted = set(STEPS) if not names or "all" in names else set(names)
    if start:
        wanted &= set(STEPS[STEPS.index(start) :])
    if until:
        wanted &= set(STEPS[: STEPS.index(until) + 1])
    if not wanted:
        raise ConfigError("these options leave no step to run")
    return tuple(step for step in STEPS if step in wanted)


def with_upstream(wanted: Sequence[str]) -> tuple[str, ...]:
    """The wanted steps and all they read from, in order."""
    needed = set(wanted)
    for step in reversed(STEPS):
        if step in needed:
            needed |= KINDS[step].upstream
    return tuple(step for step in STEPS if step in needed)


def config_parts(step: str, config: Config) -> dict[str, str]:
    """The settings a step depends on, one part for each, so that a change can be named."""
    values: dict[str, Any] = config.model_dump(mode="json")
    parts: dict[str, str] = {}
    for setting in KINDS[step].settings:
        section, _, key = setting.partition(".")
        value = values[section]
        if key:
            parts[f"config:{setting}"] = str(value[key])
        elif isinstance(value, dict):
            parts |= {f"config:{section}.{name}": str(inner) for name, inner in value.items()}
        else:
            parts[f"config:{section}"] = str(value)
    return parts


def input_parts(step: str, outputs: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """Digests of the files a step reads; UNKNOWN for those an earlier step has yet to write."""
    parts = {}
    for path in KINDS[step].inputs:
        upstream, _, file = path.partition("/")
        parts[f"input:{path}"] = outputs.get(upstream, {}).get(file, UNKNOWN)
    if "evaluate" in KINDS[step].upstream and OVERRIDE in outputs.get("evaluate", {}):
        parts[f"input:{OVERRIDE}"] = outputs["evaluate"][OVERRIDE]  # beside the run's steps, where there is one
    return parts


def decide(
    step: str, parts: Mapping[str, str], past: Past, forced: bool, damage: Callable[[str, StepRecord], list[str]]
) -> Step:
    """Reuse the newest outputs made under the same key, if every byte of them is still there."""
    key = digest_mapping({**parts, "schema": SCHEMA})

    def run(reason: str) -> Step:
        return Step(step, "run", reason, key, parts)

    if not KINDS[step].cached:
        return run("looks at what is live, always")
    if forced:
        return run("forced")
    waiting = [name[6:].partition("/")[0] for name, value in parts.items() if value == UNKNOWN]
    if waiting:
        return run(f"after {', '.join(dict.fromkeys(waiting))}")
    same = next(((run_id, record) for run_id, record in past if record.key == key and record.complete), None)
    if same is None:
        return run(explain(parts, past))
    run_id, record = same
    if changed := damage(run_id, record):
        more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        return run(f"the output {step}/{changed[0]}{more} of run {run_id} changed on disk")
    return Step(step, "reuse", f"unchanged since {record.reused_from or run_id}", key, parts, source=run_id)


def explain(parts: Mapping[str, str], past: Past) -> str:
    """Which parts of the key changed since the step was last complete."""
    last = next((record for _, record in past if record.complete), None)
    if last is None:
        return "never completed" if past else "never run"
    return changes(last.parts, parts) or "key format changed"


def changes(before: Mapping[str, str], after: Mapping[str, str]) -> str:
    """The parts that differ, the first three by name."""
    names = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    # What the user touched first, consequences of it last.
    order = ("config", "source", "file", "pretrained", "version", "house", "baseline", "input", "rival")
    names.sort(key=lambda name: order.index(name.partition(":")[0]))
    # Other data has another rival: that the champion is new is news only where nothing else is.
    names = [name for name in names if not name.startswith("rival:")] or names
    told = [_change(name, before.get(name), after.get(name)) for name in names]
    return ", ".join(told[:3]) + (f" and {len(told) - 3} more" if len(told) > 3 else "")


def _change(name: str, before: str | None, after: str | None) -> str:
    kind, _, what = name.partition(":")
    if kind in ("config", "version"):
        return f"{what} {before or 'absent'} → {after or 'absent'}"
    if before is None or after is None:
        return f"{what} {'is new' if before is None else 'is gone'}"
    return f"{'pipe’s own ' if kind == 'house' else ''}{what} changed"
