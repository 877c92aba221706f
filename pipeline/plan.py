"""What has to run, and why: every decision here is a pure function of keys, records and files' digests.

The six steps as data: what each reads, which settings and packages its result depends on, how it is called.

Gathering the parts of a step's key: the one place that reads sources, versions and the registry for it.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pipeline.contract.config import Config
from pipeline.contract.errors import ConfigError
from pipeline.contract.files import digest_file, digest_mapping
from pipeline.contract.override import OVERRIDE_FILE as OVERRIDE
from pipeline.contract.registry import read_registry
from pipeline.contract.run import STEPS, Run, StepRecord
from pipeline.contract.settings.stages import Serve, Train
from pipeline.contract.signature import SEALED
from pipeline.contract.signing import SIGNATURE
from pipeline.contract.sources import HOUSE, house_sources, outside_imports, project_sources
from pipeline.data_checks.champion import NONE, PART, rival
from pipeline.history import Project, data_files, installed_versions
from pipeline.steps.pretrained import pretrained_parts
from pipeline.training.launchers import torchrun

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


# Words of the serve section that a deployment chooses; the others travel in the bundle.
DEPLOYED = tuple(name for name in Serve.model_fields if name not in SEALED)
# Words of the evaluate section that the exported variants are judged by as well.
_JUDGED = tuple(f"evaluate.{name}" for name in ("metric", "margin", "confidence", "resamples", "seed", "require"))
AGAIN = "--again"  # after the argv of the train step: somebody killed what it started


@dataclass(frozen=True)
class StepKind:
    name: str
    module: str  # what `python -m` runs; its imports are part of the key
    settings: tuple[str, ...]  # sections or single keys of the configuration
    inputs: tuple[str, ...] = ()  # files of earlier steps
    packages: tuple[str, ...] = ()  # distributions whose version matters
    user_code: bool = True
    cached: bool = True
    also: tuple[str, ...] = ()  # further packages of ours whose source ends up in the output

    @property
    def upstream(self) -> set[str]:
        return {path.partition("/")[0] for path in self.inputs}


KINDS = {
    kind.name: kind
    for kind in (
        StepKind(
            "prepare", "pipeline.steps.prepare", ("task", "codec", "prepare", "model"), packages=("torch", "numpy")
        ),
        StepKind(
            "train",
            "train",
            ("task", "train", "model.allow"),
            inputs=("prepare/data.json",),
            packages=("torch", "numpy", "safetensors"),
        ),
        StepKind(
            "evaluate",
            "pipeline.evaluate",
            ("task", "evaluate", "train.device"),
            inputs=("prepare/data.json", "train/model.safetensors"),
            packages=("torch", "numpy"),
        ),
        StepKind(
            "export",
            "export",
            ("name", "task", "codec", "export", *(f"serve.{name}" for name in SEALED), *_JUDGED),
            inputs=("prepare/data.json", "train/model.safetensors", "evaluate/verdict.json"),
            packages=("torch", "onnx", "onnxscript", "onnxruntime-gpu", "onnxruntime", "numpy"),
        ),
        StepKind(
            "package",
            "pipeline.steps.package",
            ("name", "package", "deploy.target", "deploy.gpus"),
            inputs=("export/bundle/manifest.json",),
            packages=("kserve", "onnxruntime-gpu", "onnxruntime", "numpy", "pydantic"),
            user_code=False,
            also=("serve",),
        ),
        StepKind(
            "deploy",
            "pipeline.steps.deploy",
            ("name", "deploy", "rollout", *(f"serve.{name}" for name in DEPLOYED)),
            inputs=("export/bundle/manifest.json", "package/image.json"),
            user_code=False,
            cached=False,  # what is live may have changed: it always looks
        ),
    )
}
assert tuple(KINDS) == STEPS


def argv_of(step: str, config: Config, run_directory: str) -> tuple[str, ...]:
    """The command of a step: the same here and in a pod. That of training starts what starts the processes."""
    if step == "train":
        return ("python", "-m", "pipeline.training.node", run_directory)
    python = ("python", "-m", KINDS[step].module, run_directory)
    if step == "evaluate" and config.evaluate.processes > 1:
        return torchrun(config.evaluate.processes, python)
    return python


def run_argument(root: Path, run: Run) -> str:
    """Relative to the project where it can be: the same words in a pod that mounts the project elsewhere."""
    return run.path.relative_to(root).as_posix() if run.path.is_relative_to(root) else str(run.path)


def processes_per_node(train: Train, gpus: int) -> int:
    """As configured; else one a GPU, or two on CPU so that the distributed road is the one always taken."""
    if train.processes:
        return train.processes
    return gpus if gpus and train.device != "cpu" else 2


_DISTRIBUTIONS = {"sklearn": "scikit-learn", "PIL": "pillow"}  # whose modules have other names
_IMAGE_FILES = ("k8s/images/serve.Dockerfile", "k8s/images/slim.py")


def parts_of(step: str, config: Config, project: Project, outputs: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """Named parts; `outputs` holds what is known of earlier steps' files."""
    kind = KINDS[step]
    parts = config_parts(step, config) | input_parts(step, outputs)
    parts |= _prefixed(
        "house", {k: v for module in (kind.module, *kind.also) for k, v in house_sources(module).items()}
    )
    parts |= _prefixed("version", installed_versions(kind.packages))
    parts["version:python"] = ".".join(platform.python_version_tuple()[:2])
    if kind.user_code:
        parts |= _prefixed("source", project_sources(project.root, config.task, config.codec))
        parts |= _prefixed("version", installed_versions(_imported(project, config)))
    if step == "prepare":
        parts |= _prefixed("pretrained", pretrained_parts(config, project.root, project.runs))
        parts |= _prefixed("file", data_files(project.root, config.prepare.files))
        found = rival(read_registry(project.runs, config.registry), project.runs, parts)
        parts[PART] = found.bundle if found else NONE
    if step == "package":
        parts |= _prefixed("house", {name: digest_file(HOUSE / name) for name in _IMAGE_FILES})
        if config.package.wheels:
            parts |= _prefixed("file", data_files(project.root, (f"{config.package.wheels}/*.whl",), "package.wheels"))
    if step == "package" and (signed := outputs.get("export", {}).get(f"bundle/{SIGNATURE}")):
        parts[f"input:export/bundle/{SIGNATURE}"] = signed  # the image holds it, where there is one
    if step == "evaluate":
        champion = read_registry(project.runs, config.registry).champion_for(
            outputs.get("train", {}).get("model.safetensors")
        )
        parts["baseline:champion"] = champion.bundle if champion else "the task's own"
    return parts


def _imported(project: Project, config: Config) -> tuple[str, ...]:
    """Distributions the task and codec import, as far as their name tells: reading all file lists takes too long."""
    found = outside_imports(project.root, config.task, config.codec)
    return tuple(sorted(_DISTRIBUTIONS.get(module, module) for module in found))


def _prefixed(prefix: str, parts: Mapping[str, str]) -> dict[str, str]:
    return {f"{prefix}:{name}": value for name, value in parts.items()}
