"""Writing manifests without running anything: of training, and of the whole road as a workflow."""

from __future__ import annotations

from pathlib import Path

from k8s import workflows
from k8s.objects.manifests import check_pinned, write, write_documents
from k8s.objects.training import claims, objects, run_name
from k8s.workflows import Task
from pipeline.contract.config import Config, override_config
from pipeline.contract.errors import ConfigError
from pipeline.contract.run import STEPS
from pipeline.history import Project
from pipeline.plan import KINDS, argv_of

ENGINES = ("argo", "kfp")


def render_training(project: Project, config: Config, directory: str) -> list[Path]:
    """What trains this project on a cluster, with nobody who leads it."""
    image = _image(config)
    made = objects(config, image, f"runs/{run_name(config, image)}", alone=True)
    return list(write(made, _target(project, directory, "train")))


def render_workflow(project: Project, config: Config, engine: str, directory: str) -> list[Path]:
    """All steps, each as the plan calls it, for the engine that walks them; and the volume of the runs."""
    if engine not in ENGINES:
        raise ConfigError(f"--engine {engine}: there are {' and '.join(ENGINES)}")
    image, config = _image(config), override_config(config, _in_pods(config))
    target = _target(project, directory, engine)
    files = {"claim.yaml": found} if (found := claims(config)) else {}
    if engine == "argo":
        files["workflow.yaml"] = [workflows.made(config, tasks(config, workflows.ARGO_RUN), image)]
    else:
        files["pipeline.yaml"] = workflows.documents(config, tasks(config, workflows.KFP_RUN), image)
    return write_documents(files, target)


def lacking(config: Config) -> str:
    """What keeps the last step of a workflow from having anything to deploy; empty where nothing does."""
    if config.package.build == "require" or (config.deploy.image and config.deploy.storage_uri):
        return ""
    return (
        "pods have no container builder, so the workflow's deploy step finds no image of its bundle: set deploy.image, "
        "deploy.mode=inferenceservice and deploy.storage_uri (docs/kubernetes.md, Argo and Kubeflow Pipelines), or "
        "deploy the run from where a builder is"
    )


def _in_pods(config: Config) -> list[str]:
    """A pod serves nobody itself, makes no Jobs of its step, and has no builder unless the image must bring one."""
    build = [] if config.package.build == "require" else ["package.build=never"]
    return ["deploy.target=kubernetes", "jobs.executor=local", *build]


def tasks(config: Config, run: str) -> tuple[Task, ...]:
    """The steps as a graph: each after those it reads from."""
    return tuple(
        Task(step, argv_of(step, config, run), tuple(name for name in STEPS if name in KINDS[step].upstream))
        for step in STEPS
    )


def _image(config: Config) -> str:
    if not config.train.image:
        raise ConfigError(
            "train.image is empty; name the image the training pods run: `pipe package --train --push` makes it"
        )
    check_pinned(config.train.image, "train.image")
    return config.train.image


def _target(project: Project, directory: str, name: str) -> Path:
    target = project.runs / "manifests" / name if directory == "default" else Path(directory)
    target.mkdir(parents=True, exist_ok=True)
    return target
