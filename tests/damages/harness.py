"""Run the steps in this process on a small project, and name the checks that stop it."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any
from unittest.mock import patch

import numpy as np
import onnx
from safetensors.torch import load_file

from export.__main__ import export as export_step
from pipeline.contract.registry import (
    CHAMPION,
    Entry,
    ProposedChange,
    Registry,
    champion_bundle,
    change_registry,
    read_registry,
)
from pipeline.contract.run import Run, RunFile, StepRecord
from pipeline.contract.task import load_task
from pipeline.evaluate.__main__ import evaluate
from pipeline.history import publish_step, write_record, write_run
from pipeline.steps.prepare import prepare
from pipeline.system.errors import PipelineError
from pipeline.system.files import digest_bytes, digest_file, write_json
from pipeline.verify import verify_bundle, verify_run
from tests.damages.damages import Damage
from tests.damages.kinds import KINDS, Kind, Splits
from tests.weights import save_weights
from train.batch_order import read_order
from train.ledger import LedgerLine, batch_digest

PROJECT = Path(__file__).parent / "project"
# Checks that raise an error: their name, and what they report.
MESSAGES = {
    "one value per sample": "must be a tensor of one value per sample",
    "baseline": r"baseline\(\):",
    "probabilities": r"probabilities\(\)",
    "test set changed since prepare": "changed since prepare: fingerprint",
    "digest": "content changed since export",
    "manifest": "not in the manifest|: missing ",
    "link": "a symbolic link",
    "provenance": "is about another bundle; export again",
    "golden requests": "golden requests",
    "record": "changed since the step was done",
    "seal": "were edited since pipe wrote it",
    "history": r"does not follow from the change before it|is missing; restore|registry/[0-9]{6}\.json: damaged: ",
    "champion": "^champion ",
    "exported bundle": "but the one that was exported is",
    "random operators": "draws random numbers",
    "initializers": "are others than in the checkpoint",
    "axes": "became fixed",
}
# Comparisons of the ONNX file with torch, by the inputs that parity.json names.
UNSEEN = {"batch sizes": "sizes of a service", "unseen ids": "every id of"}


@dataclass
class Project:
    """A project of one kind with one run, in a folder of its own."""

    kind: Kind
    root: Path
    prepare_settings: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def make(cls, kind: Kind, root: Path, splits: Splits, prepare_settings: Mapping[str, Any] | None = None) -> Project:
        project = cls(kind, root, prepare_settings or {})
        root.mkdir(parents=True)
        project.write_data(splits)
        project.write_code()
        project.begin("one")
        return project

    def copy(self, root: Path) -> Project:
        shutil.copytree(self.root, root, symlinks=True)
        return Project(self.kind, root)

    @property
    def run(self) -> Run:
        return Run(max(self.root.glob("runs/*/run.json")).parent)

    def write_data(self, splits: Splits) -> None:
        for split, columns in splits.items():
            np.savez(self.root / f"{split}.npz", allow_pickle=False, **columns)

    def write_code(self, task: str = "", codec: str = "") -> None:
        """`task` and `codec` are methods that replace those of the classes in project/."""
        for name, base, methods in (("task", self.kind.task, task), ("codec", self.kind.codec, codec)):
            text = (PROJECT / f"{name}.py").read_text()
            body = "\n".join(f"    {line}" if line else "" for line in (methods or "pass").splitlines())
            (self.root / f"{name}.py").write_text(f"{text}\n\nclass Own({base}):\n{body}\n")

    def begin(self, name: str) -> None:
        run = Run(self.root / "runs" / name)
        run.path.mkdir(parents=True)
        config = {
            "name": "damaged",
            "task": "task.py:Own",
            "codec": "codec.py:Own",
            "prepare": {"copies": "error", "drift": "error", **self.prepare_settings},
            "train": {"batch_size": 100_000},
            "evaluate": dict(self.kind.evaluate),
            "export": {"batch_sizes": [1, 2, 7]},
        }
        created = "2026-01-01T00:00:00+00:00"
        file = RunFile(id=name, created=created, wanted=("export",), config=config, environment={})
        write_run(run, file)

    def prepare(self) -> None:
        self._step("prepare", lambda run: prepare(run, self.root))

    def train(self) -> None:
        self._step("train", self._train)

    def evaluate(self) -> None:
        self._step("evaluate", lambda run: evaluate(run, self.root))

    def export(self) -> None:
        self._step("export", lambda run: export_step(run, self.root))

    def _train(self, run: Run) -> None:
        """Write what training writes: weights, the ledger of one step with all samples, and a summary."""
        folder, order = run.partial("train"), read_order(run.output("prepare"), 100_000, 0, 0)
        ids = order.batch(0)
        line = LedgerLine(step=1, epoch=0, samples=len(ids), digest=batch_digest(ids), processes=1, attempt=1)
        (folder / "ledger.jsonl").write_text(f"{line.model_dump_json()}\n")
        write_json(folder / "summary.json", {"steps": 1, "best_step": 1})
        save_weights(fit(self.root), folder / "model.safetensors", step=1)

    def change_weights(self, change: Callable[[dict[str, Any]], None]) -> None:
        path = self.run.output("train") / "model.safetensors"
        state = load_file(path)
        change(state)
        path.unlink()
        save_weights(state, path, step=1)

    def _step(self, step: str, work: Callable[[Run], None]) -> None:
        run = self.run
        parts = {f"file:{path.name}": digest_file(path) for path in sorted(self.root.glob("*.npz"))}
        record = write_record(run, StepRecord(step=step, status="running", key=run.id, parts=parts))
        run.partial(step).mkdir()
        work(run)
        outputs, digest = publish_step(run, step)
        write_record(run, record.model_copy(update={"status": "done", "outputs": outputs, "digest": digest}))

    def promote(self) -> None:
        """Make the run's bundle the champion, in two changes of the registry."""
        bundle, path = self.run.bundle(), f"{self.run.id}/export/bundle"
        entry = Entry(bundle=bundle.digest, checkpoint=bundle.manifest.ancestors.checkpoint, path=path)
        for change in (ProposedChange(CHAMPION, entry, "test"), ProposedChange(CHAMPION, entry, "again")):
            change_registry(self.root / "runs", "", partial(_propose, change))


def _propose(change: ProposedChange, _: Registry) -> ProposedChange:
    return change


_weights: dict[str, dict[str, Any]] = {}  # of what was trained already, by its data


def fit(root: Path) -> dict[str, Any]:
    task: Any = load_task("task.py:Own", root)
    key = type(task).__mro__[1].__name__ + digest_bytes((root / "train.npz").read_bytes())
    if key not in _weights:
        _weights[key] = task.fit().state_dict()
    return {name: tensor.clone() for name, tensor in _weights[key].items()}


def conversion(kind: str) -> str:
    """Return the function that writes the ONNX file, as its caller names it."""
    return "export.llm.kind.convert_language" if kind == "language model" else "export.ordinary.convert"


class Workplace:
    """Whole projects, each made once and copied for each damage."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.trained, self.evaluated = cache(self._trained), cache(self._evaluated)
        self.exported, self.crowned = cache(self._exported), cache(self._crowned)

    def _trained(self, kind: str) -> Project:
        project = Project.make(KINDS[kind], self.folder / kind / "trained", KINDS[kind].splits())
        project.prepare()
        project.train()
        return project

    def _evaluated(self, kind: str) -> Project:
        project = self.trained(kind).copy(self.folder / kind / "evaluated")
        project.evaluate()
        return project

    def _exported(self, kind: str) -> tuple[Project, Any]:
        """Return the project and what the conversion wrote, for the fault search."""
        project, written = self.evaluated(kind).copy(self.folder / kind / "exported"), []
        convert = resolve_name(conversion(kind))

        def keep(*arguments: Any) -> Any:
            written.append(convert(*arguments))
            shutil.copy(arguments[-1], self.folder / kind / "model.onnx")
            return written[0]

        with patch(conversion(kind), keep):
            project.export()
        return project, written[0]

    def _crowned(self, kind: str) -> Project:
        project = self.exported(kind)[0].copy(self.folder / kind / "crowned")
        project.promote()
        return project


def stopping_checks(damage: Damage, workplace: Workplace, folder: Path) -> set[str]:
    """Return the names of the checks that stop a damaged project; empty if it passes."""
    return _RUNNERS[damage.place](damage, workplace, folder / "project")


def _damaged_data(damage: Damage, workplace: Workplace, root: Path) -> set[str]:
    splits = KINDS[damage.kind].splits()
    damage.apply(splits)
    project = Project.make(KINDS[damage.kind], root, splits, damage.prepare)
    return stopped(project.prepare, project) or stopped(project.train, project) or stopped(project.evaluate, project)


def _damaged_weights(damage: Damage, workplace: Workplace, root: Path) -> set[str]:
    project = workplace.trained(damage.kind).copy(root)
    project.change_weights(damage.apply)
    return stopped(project.evaluate, project)


def _damaged_task(damage: Damage, workplace: Workplace, root: Path) -> set[str]:
    project = workplace.trained(damage.kind).copy(root)
    project.write_code(task=damage.apply)
    return stopped(project.evaluate, project)


def _damaged_codec(damage: Damage, workplace: Workplace, root: Path) -> set[str]:
    project = workplace.trained(damage.kind).copy(root)
    project.write_code(codec=damage.apply)
    return stopped(project.evaluate, project)


def _damaged_graph(damage: Damage, workplace: Workplace, root: Path) -> set[str]:
    _, written = workplace.exported(damage.kind)
    project = workplace.evaluated(damage.kind).copy(root)

    def convert(*arguments: Any) -> Any:
        model = onnx.load(workplace.folder / damage.kind / "model.onnx")
        damage.apply(model)
        onnx.save(model, arguments[-1])
        return written

    with patch(conversion(damage.kind), convert):
        return stopped(project.export, project)


def _damaged_bundle(damage: Damage, workplace: Workplace, root: Path) -> set[str]:
    project = workplace.exported(damage.kind)[0].copy(root)
    damage.apply(project.run.path)
    shutil.copytree(project.run.bundle_path, root / "bundle", symlinks=True)
    return stopped(lambda: list(verify_bundle(root / "bundle")), project)


def _served_bundle(damage: Damage, workplace: Workplace, root: Path) -> set[str]:
    project = workplace.exported(damage.kind)[0].copy(root)
    damage.apply(project.run.path)
    return stopped(project.run.bundle_to_serve, project)


def _damaged_run(damage: Damage, workplace: Workplace, root: Path) -> set[str]:
    project = workplace.exported(damage.kind)[0].copy(root)
    damage.apply(project.run.path)
    return stopped(lambda: list(verify_run(project.run)), project)


def _damaged_registry(damage: Damage, workplace: Workplace, root: Path) -> set[str]:
    project = workplace.crowned(damage.kind).copy(root)
    damage.apply(project.run.path)

    def read() -> None:
        entry = read_registry(root / "runs", "").names[CHAMPION]
        champion_bundle(entry, root / "runs", "")

    return stopped(read, project)


def _damaged_test_set(damage: Damage, workplace: Workplace, root: Path) -> set[str]:
    """Evaluate another candidate against the champion, on a changed test set."""
    project, splits = workplace.crowned(damage.kind).copy(root), KINDS[damage.kind].splits()
    damage.apply(splits)
    project.write_data(splits)
    project.begin("two")
    if checks := stopped(project.prepare, project) or stopped(project.train, project):
        return checks
    project.change_weights(lambda state: state.update({name: tensor * 1.0001 for name, tensor in state.items()}))
    return stopped(project.evaluate, project)


_RUNNERS: Mapping[str, Callable[[Damage, Workplace, Path], set[str]]] = {
    "data": _damaged_data,
    "labels": _damaged_data,
    "weights": _damaged_weights,
    "metrics": _damaged_task,
    "codec": _damaged_codec,
    "ONNX graph": _damaged_graph,
    "bundle": _damaged_bundle,
    "served bundle": _served_bundle,
    "run": _damaged_run,
    "registry": _damaged_registry,
    "test set": _damaged_test_set,
}


def stopped(work: Callable[[], Any], project: Project) -> set[str]:
    """Return the checks that stop this work, by its records and its message."""
    try:
        work()
    except PipelineError as error:
        text = " ".join(str(error).split())
        checks = {check for check, pattern in MESSAGES.items() if re.search(pattern, text)}
        return checks | _data_checks(project.run) | _failed_rules(project.run) | _differences(project.run) or {text}
    return set()


def _read(path: Path) -> Any:
    return json.loads(path.read_text()) if path.is_file() else {}


def _data_checks(run: Run) -> set[str]:
    checks = _read(run.partial("prepare") / "checks.json").get("checks", [])
    return {f"prepare.{row['check']}" for row in checks if row["level"] == "error"}


def _failed_rules(run: Run) -> set[str]:
    rules = _read(run.partial("evaluate") / "verdict.json").get("rules", [])
    return {rule["rule"] for rule in rules if not rule["passed"]}


def _differences(run: Run) -> set[str]:
    """Return in which comparisons of parity.json the ONNX file differs from torch."""
    parity = _read(run.partial("export") / "parity.json")
    checks = {"parity"} if any(map(_differs, parity.get("runs", []))) else set()
    for row in parity.get("coverage", []):
        if _differs(row):
            names = [check for check, inputs in UNSEEN.items() if row["inputs"].startswith(inputs)]
            checks |= set(names or ["unseen inputs"])
    return checks


def _differs(row: Mapping[str, Any]) -> bool:
    return bool(row["beyond_tolerance"] or row["unexplained_flips"] or row.get("changed_metrics"))
