from __future__ import annotations

import tomllib

import pytest
from packaging.requirements import Requirement

from pipeline.contract.errors import EXTRAS, missing_extra, missing_extra_in_log
from pipeline.contract.sources import SOURCE_ROOT

DISTRIBUTIONS = {  # of modules with another name
    "ai_edge_litert": "ai-edge-litert",
    "mlflow": "mlflow-skinny",
    "onnx_graphsurgeon": "onnx-graphsurgeon",
    "simdjson": "pysimdjson",
    "sklearn": "scikit-learn",
    "tensorflow": "tensorflow-cpu",
    "tf_keras": "tf-keras",
}
STORES = {"s3fs"}  # a package of its own for each kind of registry


@pytest.mark.parametrize("extra", EXTRAS)
def test_extra_installs_the_modules_it_is_named_for(extra: str) -> None:
    extras = tomllib.loads((SOURCE_ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    installed = {Requirement(line).name for line in extras[extra]}
    modules = set(EXTRAS[extra]) - STORES
    assert {DISTRIBUTIONS.get(module, module) for module in modules} <= installed


def test_missing_module_of_the_user_is_not_explained() -> None:
    assert missing_extra(ModuleNotFoundError("No module named 'mine'", name="mine")) is None
    assert missing_extra(ValueError("torch")) is None


def test_cause_of_an_import_error_is_explained() -> None:
    error = ImportError("Install s3fs to access S3")
    error.__cause__ = ModuleNotFoundError("No module named 's3fs'", name="s3fs")
    assert "pipe-road[registry]" in str(missing_extra(error))


def test_module_is_found_in_the_traceback_of_a_log() -> None:
    log = "Traceback (most recent call last):\n  ...\nModuleNotFoundError: No module named 'onnx.helper'\n"
    assert "`onnx` is not installed; to fix it: pip install 'pipe-road[train]'" in str(missing_extra_in_log(log))
    assert missing_extra_in_log("all went well") is None
