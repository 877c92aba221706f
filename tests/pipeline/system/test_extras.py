from __future__ import annotations

import tomllib

import pytest
from packaging.requirements import Requirement

from pipeline.system.errors import EXTRAS, install_command, missing_extra, missing_module_in_log
from pipeline.system.sources import SOURCE_ROOT

DISTRIBUTIONS = {  # of modules with another name
    "PIL": "pillow",
    "ai_edge_litert": "ai-edge-litert",
    "mlflow": "mlflow-skinny",
    "onnx_graphsurgeon": "onnx-graphsurgeon",
    "onnxruntime_genai": "onnxruntime-genai",
    "simdjson": "pysimdjson",
    "sklearn": "scikit-learn",
    "tensorflow": "tensorflow-cpu",
    "tf_keras": "tf-keras",
}
STORES = {"s3fs"}  # a package of its own for each kind of registry
EXTRAS_OF_PROJECT = tomllib.loads((SOURCE_ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
WITH_RUNTIME = {f"{extra}{variant}" for extra in ("serve", "train", "all") for variant in ("", "-gpu")}


def requirements(extra: str) -> set[Requirement]:
    """Return what an extra installs, with the extras it names replaced by theirs."""
    needs = {Requirement(line) for line in EXTRAS_OF_PROJECT[extra]}
    own = {need for need in needs if need.name == "pipe-road"}
    return (needs - own).union(*(requirements(name) for need in own for name in need.extras))


@pytest.mark.parametrize("extra", EXTRAS)
def test_extra_installs_the_modules_it_is_named_for(extra: str) -> None:
    modules = set(EXTRAS[extra]) - STORES
    assert {DISTRIBUTIONS.get(module, module) for module in modules} <= {need.name for need in requirements(extra)}


@pytest.mark.parametrize("extra", ["serve", "train", "all"])
def test_variant_for_gpus_differs_only_in_the_runtime(extra: str) -> None:
    cpu, gpu = requirements(extra), requirements(f"{extra}-gpu")
    linux = {"sys_platform": "linux"}
    assert {need.name for need in cpu ^ gpu if need.marker is None or need.marker.evaluate(linux)} == {
        "onnxruntime", "onnxruntime-gpu",
    }  # fmt: skip


@pytest.mark.parametrize("extra", sorted(set(EXTRAS_OF_PROJECT) - WITH_RUNTIME))
def test_other_extras_add_to_either_variant(extra: str) -> None:
    assert not {"onnxruntime", "onnxruntime-gpu"} & {need.name for need in requirements(extra)}


@pytest.mark.parametrize(
    ("installed", "expected"),
    [((), "pip install 'pipe-road[train]'"), (("onnxruntime-gpu",), "pip install 'pipe-road[train-gpu]'")],
)
def test_install_command_keeps_the_installed_runtime(
    installed: tuple[str, ...], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.system.errors._is_installed", lambda name: name in installed)
    assert install_command("train") == expected
    assert install_command("tune") == "pip install 'pipe-road[tune]'"


def test_missing_module_of_the_user_is_not_explained() -> None:
    assert missing_extra(ModuleNotFoundError("No module named 'mine'", name="mine")) is None
    assert missing_extra(ValueError("torch")) is None


def test_cause_of_an_import_error_is_explained() -> None:
    error = ImportError("Install s3fs to access S3")
    error.__cause__ = ModuleNotFoundError("No module named 's3fs'", name="s3fs")
    assert "pipe-road[registry]" in str(missing_extra(error))


def test_missing_module_is_found_in_a_log_despite_line_prefixes() -> None:
    log = "Traceback (most recent call last):\n  ...\nModuleNotFoundError: No module named 'onnx.helper'\n"
    assert f"`onnx` is not installed; to fix it: {install_command('train')}" in str(missing_module_in_log(log))
    assert missing_module_in_log("all went well") is None
    for mark in ("", "[rank1]: ", "[0] ", "[0] [rank1]: "):
        error = missing_module_in_log(f"before\n{mark}ModuleNotFoundError: No module named 'einops'\n")
        assert "the module `einops` is not installed" in str(error)
