"""Deploy the bundle of an earlier run again, with the settings of deployments as they are now."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pipeline.contract.config import Config, override_config, parse_config
from pipeline.contract.run import Run, RunFile, StepRecord
from pipeline.display import Display
from pipeline.history import Project, changed_outputs, create_run, link_outputs, load_history, lock_run, write_record
from pipeline.override import copy_override, outputs_with_override
from pipeline.plan import DEPLOYMENT_SETTINGS
from pipeline.run import run_step
from pipeline.system.errors import BundleError, ConfigError
from pipeline.work import RunRequest, Work

MANIFEST = "bundle/manifest.json"  # of the export step: its digest is that of the bundle
REDEPLOYED = "deployed again"  # reason in the records of `pipe deploy`, whose steps are those of another run


def redeploy(project: Project, source: Run, config: Config, display: Display) -> Run:
    """Deploy the bundle of an earlier run as a new run, with a new image where `config` has other settings of it."""
    again = ["deploy"] if config.package == source.config.package else ["package", "deploy"]
    records = [record for record in check_deployable(source) if record.step not in again]
    request = RunRequest(tuple(record.step for record in records))
    work = Work(project, config, request, [(source, source.read())])
    run = create_run(project.runs, config, (*request.steps, *again), parent=source.id)
    with lock_run(run):
        display.run = run
        copy_override(source, run)
        for record in records:
            link_outputs(source, run, record)
            update = {"reused_from": record.reused_from or source.id, "reason": REDEPLOYED, "seconds": 0.0}
            linked_record = write_record(run, record.model_copy(update=update))
            work.outputs[record.step] = outputs_with_override(run, linked_record)
        for step in again:
            work.outputs[step] = outputs_with_override(run, run_step(work, run, work.decide(step), display))
    return run


def deployment_config(project: Project, source: Run, overrides: Sequence[str]) -> Config:
    """Return the settings of a run's bundle, with those of deployments as pipe.yaml and the command line have them now.

    What an earlier deployment of the bundle was started with has no effect. Only the command line changes its package.
    """
    check_deployment_overrides(overrides)
    packaged = override_config(source.config, [text for text in overrides if text.startswith("package")])
    values, current = (config.model_dump(mode="json") for config in (packaged, project.config(overrides)))
    values |= {name: current[name] for name in ("registry", "deploy", "rollout", "monitor")}
    values["train"]["image"] = current["train"]["image"]  # of the pods that monitor, with the volume of the runs
    values["cluster"]["volume_claim"] = current["cluster"]["volume_claim"]
    values["serve"] |= {name: current["serve"][name] for name in DEPLOYMENT_SETTINGS}
    return parse_config(values, f"{project.root / 'pipe.yaml'} with the bundle of run {source.id}")


def check_deployment_overrides(overrides: Sequence[str]) -> None:
    for override in overrides:
        section, _, name = override.partition("=")[0].partition(".")
        is_served = section == "serve" and name in DEPLOYMENT_SETTINGS
        if section not in ("deploy", "monitor", "package", "rollout") and not is_served:
            raise ConfigError(
                f"{override}: a deployment may change only deploy.*, monitor.*, package.*, rollout.* and "
                f"serve.{{{','.join(DEPLOYMENT_SETTINGS)}}}; use `pipe run` to change other settings"
            )


def find_deployable(project: Project, source: Run, report: Callable[[str], None]) -> Run:
    """Return the run, or the newest other one of the same bundle if only that has a finished package."""
    body = source.read()
    if not (missing := _missing_steps(body)):
        return source
    complete = [(run, other) for run, other in load_history(project.runs) if not _missing_steps(other)]
    hint = f"`pipe run --resume {source.id} package` finishes it"
    if "export" not in missing:
        bundle = body.steps["export"].outputs.get(MANIFEST)
        for run, other in complete:
            if other.steps["export"].outputs.get(MANIFEST) == bundle:
                report(f"run {source.id} has no finished package; run {run.id} has one of the same bundle")
                return run
    if complete:
        hint += f"; `pipe deploy {complete[0][0].id}` deploys another bundle, of the newest complete run"
    raise ConfigError(f"run {source.id} has no finished {' and no '.join(missing)}; {hint}")


def _missing_steps(body: RunFile) -> list[str]:
    """Return the steps that a deployment needs and that are not complete."""
    return [name for name in ("export", "package") if name not in body.steps or not body.steps[name].complete]


def check_deployable(source: Run) -> list[StepRecord]:
    """Return the records of a run to deploy, after checking every file."""
    records = [record for record in source.read().steps.values() if record.step != "deploy" and record.complete]
    source.check_seal()
    for record in records:
        source.check_record(record)
        if changed := changed_outputs(source, record):
            raise BundleError(f"run {source.id}: {record.step}/{changed[0]} changed on disk; it must not be deployed")
    return records
