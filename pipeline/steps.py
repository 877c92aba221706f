"""The six steps as data: what each reads, which settings and packages its result depends on, how it is called."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pipeline.launchers import torchrun
from pipeline.spec.config import Config
from pipeline.spec.limits import SEALED
from pipeline.spec.run import STEPS, Run
from pipeline.spec.sections import Serve, Train

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
        StepKind("prepare", "pipeline.prepare", ("task", "codec", "prepare", "model"), packages=("torch", "numpy")),
        StepKind(
            "train",
            "train",
            ("task", "train", "model.allow"),
            inputs=("prepare/data.json",),
            packages=("torch", "numpy", "safetensors"),
        ),
        StepKind(
            "evaluate",
            "evaluate",
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
            "pipeline.package",
            ("name", "package", "deploy.target", "deploy.gpus"),
            inputs=("export/bundle/manifest.json",),
            packages=("kserve", "onnxruntime-gpu", "onnxruntime", "numpy", "pydantic"),
            user_code=False,
            also=("serve",),
        ),
        StepKind(
            "deploy",
            "pipeline.deploy",
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
        return ("python", "-m", "pipeline.node", run_directory)
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
