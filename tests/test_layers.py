"""Layers: which package may import which, no import cycles, and importing has no effects."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.structure import PACKAGES, ROOT, cycles, import_graph, imported_names, module_name, source_files

SOURCES = source_files()
BENCHMARKS = sorted(path for path in (ROOT / "benchmarks").rglob("*.py") if ".peers" not in path.parts)
EXAMPLES = sorted((ROOT / "examples").rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
STAGES = ("train", "export", "serve", "k8s", "pipeline.evaluate")
# Below the stages, each importing only itself and those before it.
LOWER = ("pipeline.system", "pipeline.contract", "pipeline.statistics")
MEASURED = ("pipeline", "train", "export", "serve")  # by the benchmarks
VAGUE = {"utils", "util", "helpers", "helper", "common", "misc", "manager", "managers"}


def within(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


@functools.cache
def own_imports(path: Path) -> frozenset[str]:
    return frozenset(name for name in imported_names(path) if within(name, *PACKAGES, "benchmarks"))


def forbidden_imports(files: list[Path], allowed: Callable[[str], bool]) -> list[str]:
    return [f"{module_name(path)}: {name}" for path in files for name in sorted(own_imports(path)) if not allowed(name)]


def run_python(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )


@functools.cache
def loaded_by(module: str) -> frozenset[str]:
    """Return the top-level packages in memory after a fresh interpreter imported one module."""
    done = run_python(f"import {module}, sys; print(*{{name.partition('.')[0] for name in sys.modules}})")
    assert done.returncode == 0, done.stderr
    return frozenset(done.stdout.split())


@pytest.mark.parametrize("layer", LOWER)
def test_lower_layer_imports_only_itself_and_those_below(layer: str) -> None:
    allowed = (*LOWER[: LOWER.index(layer)], layer)
    files = [path for path in SOURCES if within(module_name(path), layer)]
    assert files
    assert forbidden_imports(files, lambda name: within(name, *allowed) or name == "pipeline") == []


def test_user_code_modules_import_only_the_lowest_layer() -> None:
    user = [path for path in SOURCES if within(module_name(path), "pipeline.user")]
    assert forbidden_imports(user, lambda name: within(name, "pipeline.user", "pipeline.system")) == []


@pytest.mark.parametrize("stage", STAGES)
def test_stage_imports_only_itself_and_the_lower_layers(stage: str) -> None:
    files = [path for path in SOURCES if within(module_name(path), stage)]
    parents = {"pipeline"} if stage.startswith("pipeline.") else set()  # `from pipeline import contract`
    assert files
    assert forbidden_imports(files, lambda name: within(name, stage, *LOWER) or name in parents) == []


def test_export_imports_language_models_in_one_place() -> None:
    files = [path for path in SOURCES if within(module_name(path), "export") and "llm" not in path.parts]
    imports = forbidden_imports(files, lambda name: not within(name, "export.llm"))
    assert {line.partition(":")[0] for line in imports} == {"export.kinds"}


def test_the_service_imports_language_models_in_two_places() -> None:
    """Where routes get their handlers, and where a bundle is loaded, which most processes do without them."""
    files = [path for path in SOURCES if within(module_name(path), "serve") and "llm" not in path.parts]
    imports = forbidden_imports(files, lambda name: not within(name, "serve.llm"))
    assert {line.partition(":")[0] for line in imports} == {"serve.kinds", "serve.runtime.loading"}


def test_the_wire_imports_nothing_of_ours() -> None:
    wire = [path for path in SOURCES if within(module_name(path), "serve.wire")]
    assert wire
    assert forbidden_imports(wire, lambda name: within(name, "serve.wire")) == []


def test_benchmarks_are_imported_by_nothing_else() -> None:
    assert forbidden_imports(SOURCES, lambda name: not within(name, "benchmarks")) == []
    assert forbidden_imports(BENCHMARKS, lambda name: within(name, "benchmarks", *MEASURED)) == []


def test_no_import_cycles_counting_type_only_imports() -> None:
    assert cycles(import_graph(SOURCES)) == []


def test_no_import_cycles_between_packages() -> None:
    modules = import_graph(SOURCES)
    packages: dict[str, set[str]] = {}
    for module, targets in modules.items():
        package = package_of(module)
        packages.setdefault(package, set()).update({package_of(target) for target in targets} - {package})
    assert cycles(packages) == []


def package_of(module: str) -> str:
    """Return the package, or the module itself where it lies in `pipeline` directly."""
    return ".".join(module.split(".")[: 2 if within(module, "pipeline") else 1])


def test_cycles_are_found(tmp_path: Path) -> None:
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]
    assert cycles({"a": {"b"}, "b": set()}) == []


def test_imports_inside_functions_count() -> None:
    assert "k8s.deploy" in own_imports(ROOT / "pipeline" / "steps" / "deploy.py")


def test_only_the_kserve_model_and_a_benchmark_import_kserve() -> None:
    importers = {path for path in (*SOURCES, *BENCHMARKS) for name in imported_names(path) if within(name, "kserve")}
    assert importers == {ROOT / "serve/kserve_model.py", ROOT / "benchmarks/serve/servers/plain_kserve.py"}


def test_command_line_loads_neither_torch_nor_a_server() -> None:
    heavy = {"torch", "onnx", "onnxruntime", "kserve", "kubernetes", "fastapi", "sklearn", "optuna"}
    trackers = {"tensorboard", "mlflow", "wandb"}
    assert loaded_by("pipeline.cli") & (heavy | trackers) == set()


def test_command_line_starts_without_optional_modules() -> None:
    assert loaded_by("pipeline.cli") & {"numpy", "serve", "k8s", "train", "export"} == set()


def test_service_loads_only_what_it_needs() -> None:
    unneeded = {"torch", "onnx", "kserve", "fastapi", "pandas", "kubernetes", "grpc", "train", "export"}
    assert loaded_by("serve.__main__") & unneeded == set()


def test_a_run_directory_is_read_without_torch_or_numpy() -> None:
    assert loaded_by("pipeline.contract.run") & {"torch", "numpy"} == set()


@pytest.mark.long
def test_importing_any_module_prints_nothing() -> None:
    own_environment = {"servers", "llama.py"}  # peers are installed apart
    here = [path for path in (*SOURCES, *BENCHMARKS) if not own_environment.intersection(path.parts)]
    modules = [module_name(path) for path in here if path.stem != "__main__"]
    done = run_python("import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name)", *modules)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""


def test_every_module_states_what_it_owns() -> None:
    written = [path for path in (*SOURCES, *BENCHMARKS) if path.read_text().strip()]
    assert [module_name(path) for path in written if not ast.get_docstring(ast.parse(path.read_bytes()))] == []


def test_every_module_is_named_by_its_subject() -> None:
    names = [path.relative_to(ROOT).with_suffix("") for path in (*SOURCES, *BENCHMARKS, *EXAMPLES, *TESTS)]
    assert [str(name) for name in names if VAGUE & set(name.parts)] == []
