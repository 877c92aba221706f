"""Plan the pipeline: which steps have to run, and why.

Each step has a key, made of everything that can change its result and of nothing else: the user's code, the settings
that matter, the step's inputs, the releases of the packages that compute, and the version of the step itself. A step
whose key has been complete before is reused.
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from packaging.version import Version

from pipeline.contract.bundle import OVERRIDE_FILE
from pipeline.contract.config import Config, all_sections
from pipeline.contract.pretrained import PRETRAINED_RECORD, pretrained_parts
from pipeline.contract.registry import BASELINE_PART, champion_name, read_registry
from pipeline.contract.results import NEAR_COPIES
from pipeline.contract.run import STEPS, Run, StepRecord
from pipeline.contract.settings.bundled import BUNDLED_SETTINGS
from pipeline.contract.settings.section import Section
from pipeline.contract.settings.stages import WHEELS_FOLDER, Serve, Train
from pipeline.contract.signing import SIGNATURE
from pipeline.data_checks.champion import CHAMPION_PART, NO_CHAMPION, comparable_champion
from pipeline.history import Project, data_file_digests, installed_versions
from pipeline.system.errors import ConfigError
from pipeline.system.files import digest_mapping
from pipeline.system.sources import project_code, third_party_imports
from pipeline.system.wording import join_names

CHECK = "check"  # the step that tries the pipeline with an untrained model; no step reads its output
SCHEMA = "2"  # version of the keys; increase it to make every step run again
# The others need the builder and the kubeconfig of this machine.
CLUSTER_STEPS = (CHECK, "prepare", "train", "evaluate", "export")
UNKNOWN = "?"  # digest of an input that an earlier step has yet to write
RESTARTED_FLAG = "--again"  # argument of the train step after its process was killed

# Settings of the serve section that belong to a deployment; the others are part of the bundle.
DEPLOYMENT_SETTINGS = tuple(name for name in Serve.model_fields if name not in BUNDLED_SETTINGS)
# Settings of the evaluate section that apply to exported variants as well.
_VARIANT_SETTINGS = tuple(
    f"evaluate.{name}"
    for name in ("metric", "rule", "margin", "champion_rule", "champion_margin", "confidence", "require")
)
# Distributions whose modules have another name.
_DISTRIBUTIONS = {"sklearn": "scikit-learn", "PIL": "pillow"}
# Kinds of parts, in the order in which changes are listed: the user's own first, their consequences last.
_CHAMPION = CHAMPION_PART.partition(":")[0]
START = "start:checkpoint"  # part of the key of training that continues another run's
_PART_KINDS = (
    "config",
    "source",
    "file",
    "pretrained",
    "start",
    "judged",
    "version",
    "step",
    "baseline",
    "input",
    _CHAMPION,
)

Past = Sequence[tuple[str, StepRecord]]  # (run id, record) of one step, newest first


@dataclass(frozen=True)
class StepKind:
    name: str
    module: str  # what `python -m` runs
    version: int  # raised by hand when the step's code starts to compute something else
    settings: tuple[str, ...]  # sections or single settings
    inputs: tuple[str, ...] = ()  # files of earlier steps
    after: frozenset[str] = frozenset()  # steps that must have passed, whose output it does not read
    packages: tuple[str, ...] = ()  # distributions whose release matters
    user_code: bool = True
    unused: frozenset[str] = frozenset()  # members of task and codec that the step never uses
    named: frozenset[str] = frozenset()  # those of which it only looks whether they exist
    cached: bool = True

    @property
    def upstream(self) -> set[str]:
        return {path.partition("/")[0] for path in self.inputs} | self.after

    def user_files(self, config: Config) -> tuple[str, ...]:
        """Return the references of the classes that the step loads."""
        return (config.task, config.codec) if "codec" in self.settings else (config.task,)


_COMPUTED = frozenset({"model", "adapt", "loss", "loss_weight", "metrics", "optimizer", "parallelize"})
_JUDGED = frozenset({"example", "instances", "answer", "predicted_quantiles", "quantiles"})
_REPORTED = _JUDGED | {"text", "show", "slices", "baseline", "prompting", "language_model"}
JUDGED = "judged:metrics()"  # the code by which a trial of `pipe tune` is judged, beside the key of train
_PREDICTED = frozenset({"predicted", "probabilities", "queries"})
_SERVED = frozenset({"export_model", "serving_inputs", "serving_outputs"})

STEP_KINDS = {
    kind.name: kind
    for kind in (
        StepKind(
            CHECK,
            "pipeline.steps.check",
            version=1,
            settings=(
                *("task", "codec", "model", "export", "train.optimizer"),
                *("evaluate.metric", "evaluate.require", "evaluate.slices"),
            ),
            packages=("torch", "onnx", "onnxscript", "onnxruntime", "onnxruntime-gpu", "numpy"),
        ),
        StepKind(
            "prepare",
            "pipeline.steps.prepare",
            version=5,
            settings=("task", "prepare", "model.pretrained"),
            packages=("torch", "numpy"),
            unused=_REPORTED | _COMPUTED,
            named=_PREDICTED | {"export_model"},
        ),
        StepKind(
            "train",
            "train",
            version=1,
            settings=(
                *("task", "train", "model.allow_mismatch"),
                *(f"model.{name}" for name in ("adapter", "rank", "alpha", "targets")),
            ),
            inputs=("prepare/data.json",),
            after=frozenset({CHECK}),
            packages=("torch", "numpy"),
            unused=_REPORTED | _PREDICTED | {"actual", "metrics", "directions"},
            named=_SERVED,
        ),
        StepKind(
            "evaluate",
            "pipeline.evaluate",
            version=5,
            settings=("task", "codec", "evaluate", "train.device"),
            inputs=("prepare/data.json", f"prepare/{NEAR_COPIES}", "train/model.safetensors"),
            packages=("torch", "numpy"),
            unused=frozenset({"prompting", "language_model", "parallelize"}),
        ),
        StepKind(
            "export",
            "export",
            version=6,
            settings=(
                "name",
                "task",
                "codec",
                "export",
                *(f"serve.{name}" for name in BUNDLED_SETTINGS),
                *_VARIANT_SETTINGS,
            ),
            inputs=("prepare/data.json", "train/model.safetensors", "evaluate/verdict.json"),
            packages=("torch", "onnx", "onnxscript", "onnxruntime", "onnxruntime-gpu", "numpy"),
            unused=frozenset({"text", "show", "slices", "baseline", "parallelize", "answer"}),
        ),
        StepKind(
            "package",
            "pipeline.steps.package",
            version=2,
            settings=("name", "package", "deploy.on_cluster", "deploy.gpus", "serve.sample_packages"),
            inputs=("export/bundle/manifest.json",),
            packages=("onnxruntime", "onnxruntime-gpu", "numpy", "pydantic"),
            user_code=False,
        ),
        StepKind(
            "deploy",
            "pipeline.steps.deploy",
            version=1,
            settings=("name", "deploy", "rollout", "monitor.every", *(f"serve.{name}" for name in DEPLOYMENT_SETTINGS)),
            inputs=("export/bundle/manifest.json", "package/image.json"),
            user_code=False,
            cached=False,  # what is live may have changed
        ),
    )
}
assert tuple(STEP_KINDS) == STEPS
# The train step where `train.epochs` is 0. Its key has the weights, and the code that builds the model.
_GIVEN = replace(
    STEP_KINDS["train"],
    settings=("task", "model.allow_mismatch"),
    inputs=(f"prepare/{PRETRAINED_RECORD}",),
    packages=(),
    unused=STEP_KINDS["train"].unused | {"data", "loss", "loss_weight", "optimizer", "parallelize", "reference"},
)


def step_kind(step: str, config: Config) -> StepKind:
    return STEP_KINDS[step] if step != "train" or config.trains else _GIVEN


@dataclass(frozen=True)
class Decision:
    """The decision to run or to reuse one step."""

    name: str
    action: Literal["run", "reuse"]
    reason: str
    key: str
    parts: Mapping[str, str]
    source: str = ""  # run whose outputs are reused


def select_steps(names: Sequence[str], start: str | None, until: str | None) -> tuple[str, ...]:
    """Return the steps that a command line names, in the order of the pipeline."""
    for name in (*names, *(filter(None, (start, until)))):
        if name != "all" and name not in STEPS:
            raise ConfigError(f"no step {name!r}; there are {', '.join(STEPS)}, and all")
    selected = set(STEPS) if not names or "all" in names else set(names)
    if start:
        selected &= set(STEPS[STEPS.index(start) :])
    if until:
        selected &= set(STEPS[: STEPS.index(until) + 1])
    if "prepare" in selected:
        selected.add(CHECK)
    if not selected:
        raise ConfigError("these options leave no step to run")
    return tuple(step for step in STEPS if step in selected)


def with_upstream(selected: Sequence[str]) -> tuple[str, ...]:
    """Return the selected steps and all they read from, in order."""
    required = set(selected)
    for step in reversed(STEPS):
        if step in required:
            required |= STEP_KINDS[step].upstream
    return tuple(step for step in STEPS if step in required)


def decide_step(
    step: str, parts: Mapping[str, str], past: Past, forced: bool, changed_files: Callable[[str, StepRecord], list[str]]
) -> Decision:
    """Reuse the newest outputs made under the same key, if none of their files has changed."""
    key = digest_key(parts)

    def run(reason: str) -> Decision:
        return Decision(step, "run", reason, key, parts)

    if not STEP_KINDS[step].cached:
        return run("always checks what is live")
    if forced:
        return run("forced")
    unfinished = [name.removeprefix("input:").partition("/")[0] for name, value in parts.items() if value == UNKNOWN]
    if unfinished:
        steps = join_names(list(dict.fromkeys(unfinished)), len(STEPS))
        return run(f"only if the output of {steps} changes" if _may_be_current(parts, past) else f"after {steps}")
    reusable = next(((run_id, record) for run_id, record in past if record.is_current(key) and record.complete), None)
    if reusable is None:
        return run(explain_change(parts, past))
    run_id, record = reusable
    if changed := changed_files(run_id, record):
        return run(f"the output {step}/{join_names(changed, 1)} of run {run_id} changed on disk")
    return Decision(step, "reuse", f"unchanged since {record.reused_from or run_id}", key, parts, source=run_id)


def _may_be_current(parts: Mapping[str, str], past: Past) -> bool:
    """Return whether outputs exist that are current as far as is known before the earlier steps have run."""
    known = {name: value for name, value in parts.items() if value != UNKNOWN and name != JUDGED}
    complete = (record.current_parts for _, record in past if record.complete)
    return any(before.keys() == parts.keys() and known.items() <= before.items() for before in complete)


def digest_key(parts: Mapping[str, str]) -> str:
    return digest_mapping({**{name: value for name, value in parts.items() if name != JUDGED}, "schema": SCHEMA})


def explain_change(parts: Mapping[str, str], past: Past) -> str:
    """Return which parts of the key changed since the step was last complete."""
    last = next((record for _, record in past if record.complete), None)
    if last is None:
        return "never completed" if past else "never run"
    return describe_changes(last.current_parts, parts) or "key format changed"


def describe_changes(before: Mapping[str, str], after: Mapping[str, str], most: int = 3) -> str:
    """Name the first parts that differ, and count the rest."""
    parts = before.keys() | after.keys()
    names = sorted(name for name in parts if _is_change(name, before.get(name), after.get(name)))
    names.sort(key=lambda name: _PART_KINDS.index(name.partition(":")[0]))
    # With other data, the champion is another one, and with other code metrics(): named if nothing else changed.
    names = [name for name in names if not name.startswith(f"{_CHAMPION}:") and name != JUDGED] or names
    changes = [_describe_change(name, before.get(name), after.get(name)) for name in names]
    return join_names(changes, most)


def _is_change(name: str, before: str | None, after: str | None) -> bool:
    """Compare a part; one that is missing has the default of its setting."""
    default = default_part(name) if name.startswith("config:") else None
    return (before or default) != (after or default)


def _describe_change(name: str, before: str | None, after: str | None) -> str:
    kind, _, subject = name.partition(":")
    if kind in ("config", "version"):
        unset = default_part(name) if kind == "config" else ""
        return f"{subject} {before or unset or 'absent'} → {after or unset or 'absent'}"
    if kind == "step":
        return f"pipe computes {subject} differently"
    if before is None or after is None:
        return f"{subject} {'is new' if before is None else 'was removed'}"
    return f"{subject} changed"


def key_parts(step: str, config: Config, project: Project, outputs: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """Return the named parts of a step's key; `outputs` has the digests of earlier steps' files, where they exist."""
    kind = step_kind(step, config)
    parts = config_parts(kind, config) | input_parts(kind, outputs)
    parts[f"step:{step}"] = str(kind.version)
    parts |= _releases(kind.packages)
    parts["version:python"] = ".".join(platform.python_version_tuple()[:2])
    if kind.user_code:
        files = project_code(project.root, kind.user_files(config), kind.unused, kind.named)
        parts |= _add_prefix("source", files)
        parts |= _releases(_imported_distributions(project, config))
    if step == "train" and config.trains:
        files = project_code(project.root, kind.user_files(config), kind.unused - {"metrics", *_PREDICTED})
        parts[JUDGED] = digest_mapping(files)
    if step in (CHECK, "prepare"):
        parts |= _add_prefix("pretrained", pretrained_parts(config, project.root, project.runs))
        parts |= _add_prefix("file", data_file_digests(project.root, config.prepare.files))
        parts |= {} if config.trains else {"config:train.epochs": "0"}  # only test data is read then
    if step == "prepare":
        registry = read_registry(project.runs, config.registry)
        champion = comparable_champion(registry, project.runs, parts, champion_name(config))
        parts[CHAMPION_PART] = champion.bundle if champion else NO_CHAMPION
    if step == "evaluate":
        registry = read_registry(project.runs, config.registry)
        checkpoint = outputs.get("train", {}).get("model.safetensors")
        champion = registry.champion_for(checkpoint, champion_name(config))
        parts[BASELINE_PART] = champion.bundle if champion else "the task's own"
    if step == "package":
        if any((project.root / WHEELS_FOLDER).glob("*.whl")):
            parts |= _add_prefix("file", data_file_digests(project.root, (f"{WHEELS_FOLDER}/*.whl",)))
        if signature := outputs.get("export", {}).get(f"bundle/{SIGNATURE}"):
            parts[f"input:export/bundle/{SIGNATURE}"] = signature
    return parts


def config_parts(kind: StepKind, config: Config) -> dict[str, str]:
    """Return the settings that matter to a step and differ from their default, so that a new setting changes no key."""
    values: dict[str, Any] = config.model_dump(mode="json")
    parts: dict[str, str] = {}
    for setting in kind.settings:
        section, _, key = setting.partition(".")
        value = values[section]
        if key:
            parts[f"config:{setting}"] = str(value[key] if key in value else getattr(getattr(config, section), key))
        elif isinstance(value, dict):
            operational = getattr(config, section).operational
            parts |= {f"config:{section}.{name}": str(it) for name, it in value.items() if name not in operational}
        else:
            parts[f"config:{section}"] = str(value)
    return {name: value for name, value in parts.items() if value != default_part(name)}


def steps_of_setting(name: str) -> list[str]:
    """Return the steps that run again when this setting changes; those that read their outputs follow."""
    section, _, key = name.partition(".")
    kinds = [kind for kind in STEP_KINDS.values() if {section, name} & set(kind.settings)]
    operational = all_sections().get(section, Section).OPERATIONAL
    return [kind.name for kind in kinds if kind.cached and key not in operational]


@functools.cache
def default_part(name: str) -> str:
    """Return the part of a setting that is not set; empty where there is no default."""
    section, _, key = name.removeprefix("config:").partition(".")
    field = Config.model_fields.get(section)
    if field is None or not key:
        return ""
    defaults = field.annotation()  # type: ignore[misc]  # a section, all of whose settings have defaults
    values = defaults.model_dump(mode="json")
    return str(values[key] if key in values else getattr(defaults, key, ""))


def input_parts(kind: StepKind, outputs: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """Return the digests of the files a step reads; UNKNOWN for those an earlier step has yet to write."""
    parts = {}
    for path in kind.inputs:
        upstream, _, file = path.partition("/")
        parts[f"input:{path}"] = outputs.get(upstream, {}).get(file, UNKNOWN)
    if "evaluate" in kind.upstream and OVERRIDE_FILE in outputs.get("evaluate", {}):
        parts[f"input:{OVERRIDE_FILE}"] = outputs["evaluate"][OVERRIDE_FILE]
    return parts


def _imported_distributions(project: Project, config: Config) -> tuple[str, ...]:
    """Guess the distributions that task and codec import by name: reading all lists of installed files is too slow."""
    modules = third_party_imports(project.root, config.task, config.codec)
    return tuple(sorted(_DISTRIBUTIONS.get(module, module) for module in modules))


def _releases(distributions: Sequence[str]) -> dict[str, str]:
    """Return the major and minor version of each installed distribution: what a patch release repairs runs nothing."""
    versions = {name: Version(text) for name, text in installed_versions(tuple(distributions)).items()}
    if "onnxruntime-gpu" in versions:  # the same releases as those of onnxruntime, so either is the same part of a key
        versions["onnxruntime"] = versions.pop("onnxruntime-gpu")
    return {f"version:{name}": f"{version.major}.{version.minor}" for name, version in versions.items()}


def _add_prefix(prefix: str, parts: Mapping[str, str]) -> dict[str, str]:
    return {f"{prefix}:{name}": value for name, value in parts.items()}


def step_command(step: str, config: Config, run_directory: str) -> tuple[str, ...]:
    """Return the command of a step, the same here and in a pod; training starts a node, which starts the processes."""
    if step == "train" and config.trains:
        return ("python", "-m", "pipeline.training.node", run_directory)
    python = ("python", "-m", STEP_KINDS[step].module, run_directory)
    if step == "evaluate" and config.evaluate.processes > 1:
        return torchrun(config.evaluate.processes, python)
    return python


def torchrun(processes: int, python: tuple[str, ...]) -> tuple[str, ...]:
    """Return the command of torchrun on one machine, for steps without restarts."""
    interpreter, *module = python
    options = ("--standalone", "--nnodes=1", f"--nproc-per-node={processes}")
    return (interpreter, "-m", "torch.distributed.run", *options, *module)


def run_argument(root: Path, run: Run) -> str:
    """Return the run directory relative to the project where possible: a pod may mount the project elsewhere."""
    return run.path.relative_to(root).as_posix() if run.path.is_relative_to(root) else str(run.path)


def processes_per_node(train: Train, gpus: int) -> int:
    """Return the configured number, else one per GPU, else two on CPU, so that training is always distributed."""
    if train.processes:
        return train.processes
    return gpus if gpus and train.device != "cpu" else 2
