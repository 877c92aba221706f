from __future__ import annotations

from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from pipeline.contract.config import Config, override_config
from pipeline.contract.registry import CHAMPION, Entry, ProposedChange, change_registry
from pipeline.contract.run import STEPS, StepRecord
from pipeline.contract.settings.stages import Train
from pipeline.history import Project
from pipeline.plan import (
    CLUSTER_STEPS,
    JUDGED,
    SCHEMA,
    STEP_KINDS,
    Decision,
    config_parts,
    decide_step,
    explain_change,
    input_parts,
    key_parts,
    processes_per_node,
    select_steps,
    step_command,
    with_upstream,
)
from pipeline.system.errors import ConfigError
from pipeline.system.files import digest_mapping

Parts = dict[str, dict[str, str]]


def all_parts(config: Config, project: Project) -> Parts:
    return {step: key_parts(step, config, project, {"train": {"model.safetensors": "mine"}}) for step in STEPS}


def changed(before: Parts, after: Parts) -> dict[str, set[str]]:
    """Return the names of the parts that differ, by step."""
    differing = {step: before[step].items() ^ after[step].items() for step in STEPS}
    names = {step: {name for name, _ in items} - {JUDGED} for step, items in differing.items()}
    return {step: found for step, found in names.items() if found}


@pytest.fixture
def before(config: Config, project: Project) -> Parts:
    return all_parts(config, project)


def test_module_imported_by_the_task_is_in_its_keys(
    config: Config, project: Project, folder: Path, before: Parts
) -> None:
    (folder / "shapes.py").write_text("def size():\n    return 3\n\n\nSIZE = size()\n")
    found = changed(before, all_parts(config, project))
    assert found == {step: {"source:shapes.py"} for step in CLUSTER_STEPS}


def test_file_that_is_not_imported_is_in_no_key(config: Config, project: Project, folder: Path, before: Parts) -> None:
    (folder / "README.md").write_text("Another text.\n")
    (folder / "notes.py").write_text("x = 1\n")
    assert changed(before, all_parts(config, project)) == {}


@pytest.mark.parametrize(
    ("package", "steps"),
    [("onnxscript", ["check", "export"]), ("scikit-learn", [*CLUSTER_STEPS])],  # which the task imports
)
def test_package_version_is_in_the_keys_of_steps_that_use_it(
    package: str, steps: list[str], config: Config, project: Project, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "shapes.py").write_text("import sklearn.svm\n\n\ndef size(): ...\n")
    before, real = all_parts(config, project), metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "99" if name == package else real(name))
    assert changed(before, all_parts(config, project)) == {step: {f"version:{package}"} for step in steps}


@pytest.mark.parametrize("package", ["onnxruntime", "onnxruntime-gpu"])
def test_either_package_of_onnx_runtime_gives_the_same_key(
    package: str, config: Config, project: Project, before: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pretend(name: str) -> str:
        if not name.startswith("onnxruntime"):
            return real(name)
        if name != package:
            raise metadata.PackageNotFoundError(name)
        return "1.99.0"

    real = metadata.version
    monkeypatch.setattr(metadata, "version", pretend)
    after = all_parts(config, project)
    assert changed(before, after) == {step: {"version:onnxruntime"} for step in ("check", "export", "package")}
    assert after["export"]["version:onnxruntime"] == "1.99"


def test_code_of_pipe_counts_only_by_the_version_of_the_step(before: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not [name for parts in before.values() for name in parts if name.startswith("pipe:")]
    assert [before[step][f"step:{step}"] for step in STEPS] == [str(kind.version) for kind in STEP_KINDS.values()]


def test_operational_settings_are_in_no_key(config: Config, project: Project, before: Parts) -> None:
    operational = [
        "train.timeout_seconds=9", "train.restarts=9", "train.keep_checkpoints=9", "train.log_every=9",
        "train.trace=true", "train.workers=9", "train.threads=9", "train.image=i",
        "train.checkpoints=elsewhere",
        "train.checkpoint_every=9", "train.launcher=srun", "train.rendezvous=host:1", "evaluate.processes=2",
    ]  # fmt: skip
    assert changed(before, all_parts(override_config(config, operational), project)) == {}
    assert {name.partition("=")[0] for name in operational} == {
        f"{section}.{name}" for section in ("train", "evaluate") for name in getattr(config, section).OPERATIONAL
    }


def test_process_count_is_in_the_key_unless_elastic(config: Config, project: Project) -> None:
    def parts(*overrides: str) -> Parts:
        return all_parts(override_config(config, overrides), project)

    assert changed(parts(), parts("train.processes=3"))["train"] == {"config:train.processes"}
    exact = "train.elastic_shards=4"
    assert changed(parts(exact), parts(exact, "train.processes=3", "train.nodes=2", "train.rendezvous=host:1")) == {}


def test_default_settings_are_not_in_the_key(config: Config, project: Project, before: Parts) -> None:
    """So a setting that a later version adds changes no key."""
    assert not [name for name in before["train"] if name.startswith("config:train.")]
    assert changed(before, all_parts(override_config(config, ["train.lr=0.001"]), project)) == {}


@pytest.mark.parametrize(
    ("checkpoint", "counts"),
    [("other", {"evaluate": {"baseline:champion"}}), ("mine", {})],  # a candidate is not its own champion
)
def test_champion_is_in_the_key_of_evaluate_only(
    checkpoint: str, counts: dict[str, set[str]], config: Config, project: Project, before: Parts
) -> None:
    assert before["evaluate"]["baseline:champion"] == "the task's own"
    project.runs.mkdir()
    entry = Entry(bundle="theirs", checkpoint=checkpoint, path="old/export/bundle")
    change_registry(project.runs, "", lambda _: ProposedChange(CHAMPION, entry, "deployed"))
    after = all_parts(config, project)
    assert changed(before, after) == counts
    assert after["evaluate"]["baseline:champion"] == ("theirs" if counts else "the task's own")


def test_a_declared_data_file_counts_for_the_steps_that_read_data_first(
    config: Config, project: Project, folder: Path
) -> None:
    config = override_config(config, ["prepare.files=['*.csv']"])
    (folder / "points.csv").write_text("1,2\n")
    before = all_parts(config, project)
    (folder / "points.csv").write_text("1,3\n")
    assert changed(before, all_parts(config, project)) == {key: {"file:points.csv"} for key in ("check", "prepare")}


def test_a_folder_of_data_files_means_all_files_in_it(config: Config, project: Project, folder: Path) -> None:
    (folder / "sounds" / "yes").mkdir(parents=True)
    (folder / "sounds" / "yes" / "1.wav").write_bytes(b"RIFF")
    parts = all_parts(override_config(config, ["prepare.files=[sounds]"]), project)
    assert "file:sounds/yes/1.wav" in parts["prepare"]


def test_a_pattern_that_matches_no_file_is_a_mistake(config: Config, project: Project) -> None:
    with pytest.raises(ConfigError, match=r"prepare.files: no file matches '\*.csv'"):
        all_parts(override_config(config, ["prepare.files=['*.csv']"]), project)
    with pytest.raises(ConfigError, match=r"prepare.files: '/data/\*' must be relative to the project"):
        all_parts(override_config(config, ["prepare.files=['/data/*']"]), project)


def weights_of(folder: Path, config: Config) -> Config:
    weights = folder / "weights"
    weights.mkdir()
    (weights / "config.json").write_text('{"model_type": "llama"}')
    (weights / "model.safetensors").write_bytes(b"some weights")
    return override_config(config, ["model.pretrained=weights"])


def test_pretrained_files_are_in_the_keys_of_check_and_prepare(config: Config, project: Project, folder: Path) -> None:
    """Later steps depend on them through the outputs of prepare."""
    begun = weights_of(folder, config)
    before = all_parts(begun, project)
    assert changed(before, all_parts(begun, project)) == {}
    (folder / "weights" / "model.safetensors").write_bytes(b"SOME weights")
    first = {key: {"pretrained:model.safetensors"} for key in ("check", "prepare")}
    assert changed(before, all_parts(begun, project)) == first
    (folder / "weights" / "tokenizer.json").write_text("{}")
    assert changed(before, all_parts(begun, project)) == {
        step: {"pretrained:model.safetensors", "pretrained:tokenizer.json"} for step in ("check", "prepare")
    }


def test_unchanged_weights_are_not_read_again(
    config: Config, project: Project, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = weights_of(folder, config)
    project.runs.mkdir()
    before = key_parts("prepare", begun, project, {})
    read: list[Path] = []

    def digest(path: Path) -> str:
        read.append(path)
        return "read again"

    monkeypatch.setattr("pipeline.contract.pretrained.digest_file", digest)
    assert key_parts("prepare", begun, project, {}) == before
    assert read == []
    (folder / "weights" / "config.json").write_text('{"model_type": "qwen2"}')
    assert key_parts("prepare", begun, project, {})["pretrained:config.json"] == "read again"
    assert read == [folder / "weights" / "config.json"]


def test_allow_mismatch_is_in_the_keys_of_check_and_train(config: Config, project: Project, folder: Path) -> None:
    begun = weights_of(folder, config)
    found = changed(
        all_parts(begun, project), all_parts(override_config(begun, ["model.allow_mismatch=[a.*]"]), project)
    )
    assert found == {"check": {"config:model.allow_mismatch"}, "train": {"config:model.allow_mismatch"}}
    assert changed(all_parts(config, project), all_parts(config, project)) == {}


def test_an_id_of_the_hub_counts_by_its_name_and_revision_alone(config: Config, project: Project) -> None:
    named = override_config(config, ["model.pretrained=org/tiny@v2"])
    parts = key_parts("prepare", named, project, {})
    assert parts["config:model.pretrained"] == "org/tiny@v2"
    assert not [name for name in parts if name.startswith("pretrained:")]


def test_a_signature_counts_for_the_image_that_holds_it(config: Config, project: Project) -> None:
    outputs = {"export": {"bundle/manifest.json": "m"}}
    before = key_parts("package", config, project, outputs)
    after = key_parts("package", config, project, {"export": {**outputs["export"], "bundle/manifest.sig.json": "s"}})
    assert after.keys() - before.keys() == {"input:export/bundle/manifest.sig.json"}


PARTS = {"config:train.lr": "0.004", "source:task.py": "a" * 64, "input:prepare/data.json": "b" * 64}


def done(parts: Mapping[str, str], status: str = "done", reused_from: str = "") -> StepRecord:
    key = digest_mapping({**parts, "schema": SCHEMA})
    return StepRecord.model_validate(
        {"step": "train", "status": status, "key": key, "parts": parts, "reused_from": reused_from}
    )


def decided(
    parts: Mapping[str, str], *past: tuple[str, StepRecord], forced: bool = False, damaged: tuple[str, ...] = ()
) -> Decision:
    return decide_step("train", parts, past, forced, lambda run, record: list(damaged))


@pytest.mark.parametrize(
    ("words", "steps"),
    [
        (([], None, None), STEPS),
        ((["all"], None, None), STEPS),
        ((["export", "prepare"], None, None), ("check", "prepare", "export")),
        (([], "train", "export"), ("train", "evaluate", "export")),
    ],
)
def test_steps_are_selected_in_the_order_of_the_pipeline(words: tuple[Any, Any, Any], steps: tuple[str, ...]) -> None:
    assert select_steps(*words) == steps


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (([], "trian", None), "no step 'trian'; there are check, prepare, train, "),
        ((["trian"], None, None), "no step 'trian'; there are check, prepare, train, "),
        (([], None, "trian"), "no step 'trian'; there are check, prepare, train, "),
        ((["prepare"], "train", None), "leave no step"),
    ],
)
def test_an_unknown_or_empty_selection_is_a_mistake(words: tuple[Any, Any, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        select_steps(*words)


def test_step_includes_its_prerequisites() -> None:
    assert with_upstream(["evaluate"]) == ("check", "prepare", "train", "evaluate")
    assert with_upstream(["package"]) == STEPS[:-1]
    assert with_upstream(["prepare"]) == ("prepare",)


def test_a_step_depends_on_its_own_settings_alone(config: Config) -> None:
    other = override_config(config, ["evaluate.margin=0.3"])
    train, evaluate = STEP_KINDS["train"], STEP_KINDS["evaluate"]
    assert config_parts(train, config) == config_parts(train, other)
    assert config_parts(evaluate, config) != config_parts(evaluate, other)
    moved = override_config(config, ["deploy.port=9000"])
    kinds = STEP_KINDS.values()
    assert {kind.name for kind in kinds if config_parts(kind, config) != config_parts(kind, moved)} == {"deploy"}


def test_an_input_that_does_not_exist_yet_is_unknown() -> None:
    train = STEP_KINDS["train"]
    assert input_parts(train, {}) == {"input:prepare/data.json": "?"}
    assert input_parts(train, {"prepare": {"data.json": "abc"}}) == {"input:prepare/data.json": "abc"}


def test_equal_key_is_reused_and_names_its_run() -> None:
    step = decided(PARTS, ("second", done(PARTS, reused_from="first")), ("first", done(PARTS)))
    assert (step.action, step.source, step.reason) == ("reuse", "second", "unchanged since first")
    other = {**PARTS, "config:train.lr": "0.1"}
    assert decided(PARTS, ("new", done(other)), ("old", done(PARTS))).source == "old"


@pytest.mark.parametrize("status", ["running", "failed", "interrupted", "rejected"])
def test_only_completed_steps_are_reused(status: str) -> None:
    step = decided(PARTS, ("first", done(PARTS, status=status)))
    assert (step.action, step.reason) == ("run", "never completed")


def test_a_forced_step_runs_though_nothing_changed() -> None:
    assert decided(PARTS, ("first", done(PARTS)), forced=True).reason == "forced"


def test_step_with_an_unknown_input_runs_after_the_step_before() -> None:
    unknown = {**PARTS, "input:prepare/data.json": "?"}
    step = decided({**unknown, "config:train.lr": "0.1"}, ("first", done(PARTS)))
    assert (step.action, step.reason) == ("run", "after prepare")
    step = decided(unknown, ("first", done(PARTS)))
    assert (step.action, step.reason) == ("run", "only if the output of prepare changes")


def test_damaged_outputs_are_not_reused() -> None:
    step = decided(PARTS, ("first", done(PARTS)), damaged=("model.safetensors", "summary.json"))
    assert step.action == "run"
    assert step.reason == "the output train/model.safetensors and 1 more of run first changed on disk"


def test_deploy_always_checks_the_live_service() -> None:
    step = decide_step("deploy", PARTS, [("first", done(PARTS))], False, lambda run, record: [])
    assert (step.action, step.reason) == ("run", "always checks what is live")


def test_the_key_covers_every_part() -> None:
    key = decided(PARTS).key
    assert len({key} | {decided({**PARTS, name: "other"}).key for name in PARTS}) == 1 + len(PARTS)


ALL_KINDS = {"input:prepare/data.json": "1", "version:torch": "2", "source:task.py": "3", "config:train.lr": "0.1"}


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        (PARTS, {**PARTS, "config:train.lr": "0.05"}, "train.lr 0.004 → 0.05"),
        (PARTS, {**PARTS, "version:torch": "2.13.0"}, "torch absent → 2.13.0"),
        (PARTS, {**PARTS, "source:task.py": "d"}, "task.py changed"),
        ({**PARTS, "step:train": "1"}, {**PARTS, "step:train": "2"}, "pipe computes train differently"),
        ({**PARTS, "config:train.epochs": "3"}, PARTS, "train.epochs 3 → 10"),  # the default
        ({**PARTS, "reference:champion": "none"}, {**PARTS, "reference:champion": "b"}, "champion changed"),
        (
            {**PARTS, "reference:champion": "none"},
            {**PARTS, "reference:champion": "b", "source:task.py": "d"},
            "task.py changed",
        ),
        ({**PARTS, "source:old.py": "c"}, {**PARTS, "source:new.py": "c"}, "new.py is new, old.py was removed"),
        (
            ALL_KINDS,
            dict.fromkeys(ALL_KINDS, "9"),
            "train.lr 0.1 → 9, task.py changed, torch 2 → 9 and 1 more",  # first what the user touched
        ),
    ],
)
def test_changed_parts_are_named(before: Mapping[str, str], after: Mapping[str, str], reason: str) -> None:
    assert explain_change(after, [("first", done(before))]) == reason
    assert explain_change(after, []) == "never run"


def test_a_step_is_compared_with_its_last_completion_not_its_last_failure() -> None:
    past = [("second", done({**PARTS, "config:train.lr": "9"}, status="failed")), ("first", done(PARTS))]
    assert explain_change({**PARTS, "config:train.lr": "0.05"}, past) == "train.lr 0.004 → 0.05"


def test_step_commands_do_not_depend_on_the_launcher(config: Config) -> None:
    assert step_command("prepare", config, "runs/one") == ("python", "-m", "pipeline.steps.prepare", "runs/one")
    assert step_command("evaluate", config, "runs/one") == ("python", "-m", "pipeline.evaluate", "runs/one")
    for words in (["train.processes=1"], ["train.launcher=mpirun"], ["train.nodes=2:3", "train.rendezvous='a:1'"]):
        argv = step_command("train", override_config(config, words), "runs/one")
        assert argv == ("python", "-m", "pipeline.training.node", "runs/one")


def test_training_on_several_machines_is_evaluated_on_one(config: Config) -> None:
    many = override_config(config, ["train.nodes=3", "train.rendezvous='head:29500'", "evaluate.processes=2"])
    argv = step_command("evaluate", many, "runs/one")
    torchrun = "python -m torch.distributed.run --standalone --nnodes=1 --nproc-per-node=2"
    assert " ".join(argv) == f"{torchrun} -m pipeline.evaluate runs/one"


def test_default_is_one_process_per_gpu_or_two_on_a_cpu() -> None:
    assert processes_per_node(Train(), gpus=0) == 2
    assert processes_per_node(Train(), gpus=4) == 4
    assert processes_per_node(Train(device="cpu"), gpus=4) == 2
    assert processes_per_node(Train(processes=3), gpus=4) == 3
