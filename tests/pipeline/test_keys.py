from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest

from pipeline.keys import parts_of
from pipeline.project import Project
from pipeline.spec.config import Config, override_config
from pipeline.spec.errors import ConfigError
from pipeline.spec.registry import CHAMPION, Entry, Wanted, change_registry
from pipeline.spec.run import STEPS

Parts = dict[str, dict[str, str]]


def all_parts(config: Config, project: Project) -> Parts:
    return {step: parts_of(step, config, project, {"train": {"model.safetensors": "mine"}}) for step in STEPS}


def changed(before: Parts, after: Parts) -> dict[str, set[str]]:
    """Steps whose parts differ, and the names that do."""
    differing = {step: before[step].items() ^ after[step].items() for step in STEPS}
    return {step: {name for name, _ in items} for step, items in differing.items() if items}


@pytest.fixture
def before(config: Config, project: Project) -> Parts:
    return all_parts(config, project)


def test_a_module_the_task_imports_counts_as_its_source(
    config: Config, project: Project, folder: Path, before: Parts
) -> None:
    (folder / "shapes.py").write_text("def size():\n    return 3\n")
    found = changed(before, all_parts(config, project))
    assert found == {step: {"source:shapes.py"} for step in ("prepare", "train", "evaluate", "export")}


def test_a_file_nobody_imports_counts_nowhere(config: Config, project: Project, folder: Path, before: Parts) -> None:
    (folder / "README.md").write_text("Another text.\n")
    (folder / "notes.py").write_text("x = 1\n")
    assert changed(before, all_parts(config, project)) == {}


def test_a_new_version_of_a_package_counts_where_it_matters(
    config: Config, project: Project, before: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "99" if name == "onnxscript" else real(name))
    assert changed(before, all_parts(config, project)) == {"export": {"version:onnxscript"}}


def test_a_new_version_of_what_the_task_imports_counts_in_every_step_that_runs_it(
    config: Config, project: Project, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "shapes.py").write_text("import sklearn.svm\n\n\ndef size(): ...\n")
    before, real = all_parts(config, project), metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "99" if name == "scikit-learn" else real(name))
    steps = ("prepare", "train", "evaluate", "export")
    assert changed(before, all_parts(config, project)) == {step: {"version:scikit-learn"} for step in steps}


def test_our_own_source_counts_for_the_step_that_runs_it(before: Parts) -> None:
    assert "house:train/trainer.py" in before["train"]
    assert "house:train/trainer.py" not in before["evaluate"]
    assert "house:pipeline/spec/data.py" in before["train"]
    assert "house:serve/runtime/session.py" in before["package"], "the container carries it"
    assert "house:k8s/images/serve.Dockerfile" in before["package"]


def test_another_champion_counts_for_the_evaluation_alone(config: Config, project: Project, before: Parts) -> None:
    assert before["evaluate"]["baseline:champion"] == "the task's own"
    project.runs.mkdir()
    entry = Entry(bundle="theirs", checkpoint="other", path="old/export/bundle")
    change_registry(project.runs, "", lambda _: Wanted(CHAMPION, entry, "deployed"))
    after = all_parts(config, project)
    assert changed(before, after) == {"evaluate": {"baseline:champion"}}
    assert after["evaluate"]["baseline:champion"] == "theirs"


def test_a_candidate_is_not_its_own_champion(config: Config, project: Project, before: Parts) -> None:
    project.runs.mkdir()
    entry = Entry(bundle="its own", checkpoint="mine", path="old/export/bundle")
    change_registry(project.runs, "", lambda _: Wanted(CHAMPION, entry, "deployed"))
    assert changed(before, all_parts(config, project)) == {}


def test_a_declared_data_file_counts_for_prepare(config: Config, project: Project, folder: Path) -> None:
    config = override_config(config, ["prepare.files=['*.csv']"])
    (folder / "points.csv").write_text("1,2\n")
    before = all_parts(config, project)
    (folder / "points.csv").write_text("1,3\n")
    assert changed(before, all_parts(config, project)) == {"prepare": {"file:points.csv"}}


def test_a_pattern_that_matches_no_file_is_a_mistake(config: Config, project: Project) -> None:
    with pytest.raises(ConfigError, match=r"prepare.files: no file matches '\*.csv'"):
        all_parts(override_config(config, ["prepare.files=['*.csv']"]), project)


def weights_of(folder: Path, config: Config) -> Config:
    weights = folder / "weights"
    weights.mkdir()
    (weights / "config.json").write_text('{"model_type": "llama"}')
    (weights / "model.safetensors").write_bytes(b"some weights")
    return override_config(config, ["model.pretrained=weights"])


def test_another_byte_of_pretrained_weights_is_another_prepare(config: Config, project: Project, folder: Path) -> None:
    """The others hear of it by what prepare writes."""
    begun = weights_of(folder, config)
    before = all_parts(begun, project)
    assert changed(before, all_parts(begun, project)) == {}
    (folder / "weights" / "model.safetensors").write_bytes(b"SOME weights")
    assert changed(before, all_parts(begun, project)) == {"prepare": {"pretrained:model.safetensors"}}
    (folder / "weights" / "tokenizer.json").write_text("{}")
    assert changed(before, all_parts(begun, project)) == {
        "prepare": {"pretrained:model.safetensors", "pretrained:tokenizer.json"}
    }


def test_weights_that_nobody_touched_are_not_read_again(
    config: Config, project: Project, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = weights_of(folder, config)
    project.runs.mkdir()
    before = parts_of("prepare", begun, project, {})
    read: list[Path] = []

    def digest(path: Path) -> str:
        read.append(path)
        return "read again"

    monkeypatch.setattr("pipeline.pretrained.digest_file", digest)
    assert parts_of("prepare", begun, project, {}) == before
    assert read == []
    (folder / "weights" / "config.json").write_text('{"model_type": "qwen2"}')
    assert parts_of("prepare", begun, project, {})["pretrained:config.json"] == "read again"
    assert read == [folder / "weights" / "config.json"]


def test_what_may_differ_counts_where_weights_are_matched(config: Config, project: Project, folder: Path) -> None:
    begun = weights_of(folder, config)
    found = changed(all_parts(begun, project), all_parts(override_config(begun, ["model.allow=[a.*]"]), project))
    assert found == {"prepare": {"config:model.allow"}, "train": {"config:model.allow"}}
    assert changed(all_parts(config, project), all_parts(config, project)) == {}


def test_an_id_of_the_hub_counts_by_its_name_and_revision_alone(config: Config, project: Project) -> None:
    named = override_config(config, ["model.pretrained=org/tiny", "model.revision=v2"])
    parts = parts_of("prepare", named, project, {})
    assert parts["config:model.pretrained"] == "org/tiny"
    assert not [name for name in parts if name.startswith("pretrained:")]


def test_a_signature_counts_for_the_image_that_holds_it(config: Config, project: Project) -> None:
    outputs = {"export": {"bundle/manifest.json": "m"}}
    before = parts_of("package", config, project, outputs)
    after = parts_of("package", config, project, {"export": {**outputs["export"], "bundle/manifest.sig.json": "s"}})
    assert after.keys() - before.keys() == {"input:export/bundle/manifest.sig.json"}
