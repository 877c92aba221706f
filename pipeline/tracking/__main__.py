"""Send one run to one tracker: `python -m pipeline.tracking mlflow runs/RUN`.

With `--follow`, `pipe` runs it beside the steps: it sends what is new every few seconds, until its standard input ends.
All it sends is in the run directory, and it records there what the tracker has. So a tracker that fails is tried again
and misses nothing, and a later command continues the same run of the tracker.
"""

from __future__ import annotations

import argparse
import os
import re
import secrets
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from pipeline.contract.results import NewLines, read_facts
from pipeline.contract.run import Run
from pipeline.report.page import write_report
from pipeline.system.errors import PipelineError, missing_extra
from pipeline.system.files import exclusive_lock, read_object, write_json
from pipeline.tracking.contents import (
    Ending,
    Point,
    bundle_files,
    is_uploaded,
    read_ending,
    read_params,
    read_points,
    read_results,
    read_tags,
    result_files,
    training_key,
)
from pipeline.tracking.process import END_TIMEOUT_SECONDS, MARK, state_file

_POLL_SECONDS = 2.0
_RETRY_SECONDS = 60.0
_MAX_PROBLEM = 500  # characters
_NICE = 5  # training comes first

Value = TypeVar("Value")


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


@dataclass
class Sent:
    """What the tracker has of this run."""

    run: str = ""  # its own id of the run
    training: str = ""  # key of the training whose curves it has
    steps: dict[str, int] = field(default_factory=dict)  # last step by kind of line
    results: dict[str, float] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)


class Sender:
    """Sends what the tracker does not have yet."""

    def __init__(self, name: str, tracker: Tracker, run: Run, root: Path) -> None:
        self._name, self._tracker, self._run, self._root = name, tracker, run, root
        self._path = state_file(run, name)
        remedy = "delete it, and everything is sent again"
        self._sent = Sent(**read_object(self._path, remedy=remedy)) if self._path.exists() else Sent()
        self._lines = NewLines()
        self._is_open = False
        self._seen = ""  # content of run.json that results and tags were read with

    def send(self) -> None:
        """Send params, curves, results and tags; raise what the client raises."""
        body = self._run.read()
        self._begin_again_if_replaced(training_key(body))
        if not self._is_open:
            self._open()
        steps = dict(self._sent.steps)
        if training_key(body) and (points := read_points(self._lines, self._run, steps)):
            try:
                self._tracker.log(points)
            except BaseException:
                self._lines = NewLines()  # read them again
                raise
            self._sent.steps = steps
            self._record()
        if (seen := body.model_dump_json()) != self._seen:  # a step began or ended
            self._send_results()
            self._seen = seen

    def finish(self) -> None:
        """Send the rest and the files, and end the run of the tracker."""
        self.send()
        self._send_results()
        with tempfile.TemporaryDirectory(prefix="pipe-tracking-") as folder:
            page = Path(folder) / "report.html"
            write_report(self._run, page)
            self._tracker.upload({**result_files(self._run), page.name: page}, bundle_files(self._run))
            self._tracker.close(read_ending(self._run.read()))

    def _open(self) -> None:
        run = self._tracker.open(self._sent.run)
        if run != self._sent.run:
            self._forget(run)
        self._record()
        self._tracker.set_params(read_params(self._run))
        self._is_open = True
        report(f"{self._name}: {self._tracker.describe()}")

    def _begin_again_if_replaced(self, training: str) -> None:
        """Begin another run of the tracker where training began again: the curves of the old one are not its own."""
        if training and self._sent.training and training != self._sent.training:
            if not self._is_open:
                self._tracker.open(self._sent.run)
            self._tracker.tag({"replaced": "training began again in another run of the tracker"})
            self._tracker.close("killed")
            self._forget("")
            self._is_open = False
        self._sent.training = training or self._sent.training

    def _forget(self, run: str) -> None:
        """Send everything to this run of the tracker; empty: to a new one."""
        self._sent, self._lines, self._seen = Sent(run, self._sent.training), NewLines(), ""

    def _send_results(self) -> None:
        facts = read_facts(self._run)
        results, tags = read_results(facts), read_tags(self._run, self._root, facts)
        if new := _difference(results, self._sent.results):
            self._tracker.summarize(new, max(self._sent.steps.values(), default=0))
            self._sent.results = results
        if changed := _difference(tags, self._sent.tags):
            self._tracker.tag(changed)
            self._sent.tags = tags
        self._record()

    def _record(self) -> None:
        self._path.parent.mkdir(exist_ok=True)
        write_json(self._path, asdict(self._sent))


def _difference(values: Mapping[str, Value], sent: Mapping[str, Value]) -> dict[str, Value]:
    return {name: value for name, value in values.items() if sent.get(name) != value}


def follow(sender: Sender, name: str, wait: Callable[[float], bool]) -> int:
    """Send until `wait` returns that the run has ended; return 1 if the tracker did not get everything."""
    seconds, retry_at, is_failing = 0.0, 0.0, False
    while True:
        ended = wait(seconds)
        seconds = _POLL_SECONDS
        if not ended and time.monotonic() < retry_at:
            continue
        try:
            (sender.finish if ended else sender.send)()
        except Exception as error:  # whatever a client raises must not end this process
            if not is_failing:
                report(f"warning: {name}: {_describe(error)}; the run goes on, and sends it again later")
            traceback.print_exc()
            is_failing, retry_at = True, time.monotonic() + _RETRY_SECONDS
        else:
            if is_failing:
                report(f"{name}: has received everything again")
            is_failing = False
        if ended:
            return int(is_failing)


def _describe(error: Exception) -> str:
    text = str(missing_extra(error) or f"{type(error).__name__}: {error}")
    return " ".join(text.split())[:_MAX_PROBLEM].rstrip(".")


def report(text: str) -> None:
    """Print a line that `pipe` passes on; it finds it by the mark."""
    print(f"{MARK}{text}", flush=True)


def _wait_for_end(seconds: float) -> bool:
    """Return whether standard input ended within the time; from then on the time is limited."""
    if not select.select([0], [], [], seconds)[0]:
        return False
    while os.read(0, 4096):
        pass
    signal.alarm(END_TIMEOUT_SECONDS)  # a client may hang
    return True


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="pipeline.tracking", description="send one run to one tracker")
    parser.add_argument("tracker", choices=sorted(TRACKERS))
    parser.add_argument("run", type=Path, help="run directory")
    parser.add_argument("--root", type=Path, default=Path(), help="project folder (default: here)")
    parser.add_argument("--follow", action="store_true", help="go on until standard input ends")
    options = parser.parse_args(argv)
    run = Run(options.run.resolve())
    os.nice(_NICE)
    try:
        sender = Sender(options.tracker, TRACKERS[options.tracker](run), run, options.root.resolve())
    except PipelineError as error:
        report(f"warning: {options.tracker}: {error}")
        return 1
    status = follow(sender, options.tracker, _wait_for_end if options.follow else lambda _: True)
    if status:
        command = f"python -m pipeline.tracking {options.tracker} {options.run}"
        report(f"warning: {options.tracker}: does not have all of this run; `{command}` sends the rest")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
