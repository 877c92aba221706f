"""The trackers: MLflow and Weights & Biases through their own clients, which read their own environment variables."""

from __future__ import annotations

import os
import re
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

from pipeline.contract.run import Run
from pipeline.system.locks import exclusive_lock
from pipeline.tracking.contents import Ending, Point, is_uploaded

_BATCH = 100  # params, or tags, of one request to MLflow; it accepts ten times as many metrics
_MAX_TEXT = 5000  # characters of a param or a tag


Tracker: TypeAlias = "MLflow | WandB"


class MLflow:
    """A run of MLflow: at MLFLOW_TRACKING_URI, or else in a database next to the runs."""

    def __init__(self, run: Run) -> None:
        # Its own defaults wait for minutes; what fails is sent again later.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")
        self._run, self._id, self._experiment = run, "", ""
        self._client: Any = None
        self._local = "MLFLOW_TRACKING_URI" not in os.environ

    def open(self, run_id: str) -> str:
        """Continue the run with this id, or begin one where there is none; return its id."""
        from mlflow import MlflowClient  # slow to load

        need = "which the database needs; to fix it: set MLFLOW_TRACKING_URI to a server" if self._local else ""
        with exclusive_lock(self._run.runs / ".mlflow.lock", need):  # of several trials, one creates the database
            self._client = MlflowClient(f"sqlite:///{self._run.runs / 'mlflow.db'}" if self._local else None)
            self._experiment = os.environ.get("MLFLOW_EXPERIMENT_ID") or self._find_experiment()
        if run_id and self._has_run(run_id):
            self._client.update_run(run_id, status="RUNNING")
        else:
            run_id = self._client.create_run(self._experiment, run_name=self._run.id).info.run_id
        self._id = run_id
        return run_id

    def set_params(self, params: Mapping[str, str]) -> None:
        """Set those that are not set: MLflow never changes a param, so a resume with other settings is a tag."""
        from mlflow.entities import Param

        existing = self._client.get_run(self._id).data.params
        new = [Param(_key(name), value[:_MAX_TEXT]) for name, value in params.items() if _key(name) not in existing]
        for batch in _batches(new, _BATCH):
            self._client.log_batch(self._id, params=batch)

    def describe(self) -> str:
        """Return where the run can be seen."""
        return f"run {self._id}: {self._client.tracking_uri}"

    def log(self, points: Sequence[Point]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [
            Metric(_key(name), value, now, point.step) for point in points for name, value in point.values.items()
        ]
        for batch in _batches(metrics, 10 * _BATCH):
            self._client.log_batch(self._id, metrics=batch)

    def summarize(self, results: Mapping[str, float], step: int) -> None:
        self.log([Point(step, results)])

    def tag(self, tags: Mapping[str, str]) -> None:
        from mlflow.entities import RunTag

        names = {"git.commit": "mlflow.source.git.commit"}
        entries = [RunTag(names.get(name, f"pipe.{_key(name)}"), value[:_MAX_TEXT]) for name, value in tags.items()]
        for batch in _batches(entries, _BATCH):
            self._client.log_batch(self._id, tags=batch)

    def upload(self, results: Mapping[str, Path], bundle: Mapping[str, Path]) -> None:
        for name, path in {**results, **bundle}.items():
            if is_uploaded(path):
                self._client.log_artifact(self._id, str(path), name.rpartition("/")[0] or None)

    def close(self, ending: Ending) -> None:
        if ending != "unfinished":
            self._client.set_terminated(self._id, status=ending.upper())

    def _has_run(self, run_id: str) -> bool:
        """Return False for a run of another server, or one that was removed."""
        from mlflow.exceptions import MlflowException

        try:
            self._client.get_run(run_id)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return False
        return True

    def _find_experiment(self) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or self._run.config.name
        experiment = self._client.get_experiment_by_name(name)
        if experiment is not None:
            return str(experiment.experiment_id)
        folder = (self._run.runs / "mlartifacts" / name).as_uri() if self._local else None
        return str(self._client.create_experiment(name, artifact_location=folder))


class WandB:
    """A run of Weights & Biases, in the mode of WANDB_MODE."""

    def __init__(self, run: Run) -> None:
        os.environ.setdefault("WANDB_INIT_TIMEOUT", "30")  # its own default is longer; what fails is sent again later
        self._source = run
        self._run: Any = None
        self._wandb: Any = None

    def open(self, run_id: str) -> str:
        import wandb  # slow to load

        self._wandb = wandb
        run, body = self._source, self._source.read()
        folder = os.environ.get("WANDB_DIR") or str(run.runs)
        id_ = run_id or secrets.token_hex(4)
        self._run = wandb.init(
            id=id_,
            resume="allow",
            project=os.environ.get("WANDB_PROJECT") or run.config.name,
            name=run.id,
            group=os.environ.get("WANDB_RUN_GROUP") or body.study or None,
            dir=folder,
            settings=wandb.Settings(console="off"),
        )
        return id_

    def set_params(self, params: Mapping[str, str]) -> None:
        self._run.config.update(dict(params), allow_val_change=True)

    def describe(self) -> str:
        place = Path(self._run.dir).parent if self._run.offline else self._run.url or "disabled by WANDB_MODE"
        return f"run {self._run.id}: {place}"

    def log(self, points: Sequence[Point]) -> None:
        for point in points:
            self._run.log(dict(point.values), step=point.step)

    def summarize(self, results: Mapping[str, float], step: int) -> None:  # noqa: ARG002 - as of MLflow
        self._run.summary.update(dict(results))

    def tag(self, tags: Mapping[str, str]) -> None:
        self._run.config.update({f"pipe.{name}": value for name, value in tags.items()}, allow_val_change=True)
        self._run.summary.update({name: tags[name] for name in ("verdict",) if name in tags})

    def upload(self, results: Mapping[str, Path], bundle: Mapping[str, Path]) -> None:
        for kind, files in (("results", results), ("model", bundle)):
            if not files:
                continue
            artifact = self._wandb.Artifact(f"{self._source.config.name}-{kind}", type=kind)
            for name, path in files.items():
                if is_uploaded(path):
                    artifact.add_file(str(path), name=name, policy="immutable")  # without a copy
                else:
                    artifact.add_reference(path.as_uri(), name=name, checksum=False)
            self._run.log_artifact(artifact)

    def close(self, ending: Ending) -> None:
        self._run.finish(exit_code={"failed": 1, "killed": 255}.get(ending, 0))


TRACKERS: Mapping[str, type[MLflow] | type[WandB]] = {"mlflow": MLflow, "wandb": WandB}


def _key(name: str) -> str:
    """Return a name with only the characters that MLflow accepts."""
    return re.sub(r"[^\w\-. /:]", "_", name)[:250]


def _batches(items: Sequence[Any], size: int) -> Iterator[list[Any]]:
    rest = iter(items)
    while batch := list(islice(rest, size)):
        yield batch
