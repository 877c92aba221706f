"""The `jobs` section of `pipe.yaml`: which steps run as Jobs, and where in the image."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from pipeline.spec.section import Positive, Section

StepName = Literal["prepare", "train", "evaluate", "export", "package", "deploy"]


class Jobs(Section):
    """Steps as Jobs: in `deploy.namespace`, from the image `train.image`; `cluster` says what their pods ask for."""

    executor: Literal["local", "kubernetes"] = Field(
        "local", description="processes on this machine, or Jobs on a cluster; `--executor` sets it"
    )
    steps: tuple[StepName, ...] = Field(
        ("prepare", "train", "evaluate", "export"), description="steps that run as Jobs; the others run here"
    )
    project: str = Field(
        "/project", pattern="^/.+", description="project folder in the image; the volume of runs is mounted below it"
    )
    timeout_seconds: Positive = Field(
        300, description="longest wait for a pod whose image or settings the cluster cannot get"
    )
