"""The house's walls: who may import whom, how long a file may be, and that importing does nothing."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

HOUSE = Path(__file__).resolve().parents[1]
STAGES = ("train", "evaluate", "export", "serve", "k8s")
PACKAGES = ("pipeline", *STAGES, "bench")
VAGUE = {"utils", "util", "helpers", "helper", "common", "misc", "manager", "managers"}
SOURCES = sorted(path for package in PACKAGES for path in (HOUSE / package).rglob("*.py") if ".peers" not in path.parts)
EXAMPLES = sorted((HOUSE / "examples").rglob("*.py"))
TESTS = sorted((HOUSE / "tests").rglob("*.py"))


def module_of(path: Path) -> str:
    parts = path.relative_to(HOUSE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def package_of(path: Path) -> str:
    return path.relative_to(HOUSE).parts[0]


def imports_of(path: Path) -> Iterator[str]:
    """Every dotted name a file imports, wherever in it; house style has no relative imports."""
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}, line {node.lineno}: a relative import"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def ours(path: Path) -> set[str]:
    return {name for name in imports_of(path) if name.partition(".")[0] in PACKAGES}


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def strangers(files: list[Path], allowed: Callable[[Path, str], bool]) -> list[str]:
    """Every import of ours that a file must not make."""
    return [f"{module_of(path)}: {name}" for path in files for name in sorted(ours(path)) if not allowed(path, name)]


def run_python(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program, *arguments], cwd=HOUSE, capture_output=True, text=True, timeout=120, check=False
    )


def loaded_by(module: str) -> set[str]:
    """Top-level packages in memory after a fresh interpreter imported one module."""
    done = run_python(f"import {module}, sys; print(*{{name.partition('.')[0] for name in sys.modules}})")
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_contracts_import_none_of_ours_but_each_other() -> None:
    contracts = [path for path in SOURCES if within(module_of(path), "pipeline.spec")]
    assert strangers(contracts, lambda _, name: within(name, "pipeline.spec")) == []


def test_a_stage_imports_itself_and_the_contracts_alone() -> None:
    stages = [path for path in SOURCES if package_of(path) in STAGES]
    assert strangers(stages, lambda path, name: within(name, package_of(path)) or within(name, "pipeline.spec")) == []


def test_the_bench_imports_what_it_measures_and_is_imported_by_nobody() -> None:
    bench = [path for path in SOURCES if package_of(path) == "bench"]
    others = [path for path in SOURCES if package_of(path) != "bench"]
    allowed = ("bench", "pipeline", "train", "export")
    assert strangers(bench, lambda _, name: any(within(name, package) for package in allowed)) == []
    assert strangers(others, lambda _, name: not within(name, "bench")) == []


def test_the_walls_are_looked_at_where_they_stand() -> None:
    """With an empty list of files, or blind to some imports, the tests above would pass."""
    assert {package_of(path) for path in SOURCES} == set(PACKAGES)
    assert "pipeline.spec.step" in ours(HOUSE / "pipeline" / "prepare.py")
    assert "k8s.deploy" in ours(HOUSE / "pipeline" / "deploy.py"), "imports inside functions count"


def test_kserve_is_imported_under_serve_alone_and_where_it_is_raced_against() -> None:
    importers = {path for path in SOURCES for name in imports_of(path) if within(name, "kserve")}
    assert {package_of(path) for path in importers - {HOUSE / "bench/serve/servers/plain_kserve.py"}} == {"serve"}


def test_the_command_line_loads_no_torch_and_no_server() -> None:
    heavy = {"torch", "onnx", "onnxruntime", "kserve", "kubernetes", "fastapi", "tensorboard", "sklearn", "optuna"}
    assert loaded_by("pipeline.cli") & heavy == set()


def test_the_command_line_starts_without_what_only_some_commands_need() -> None:
    assert loaded_by("pipeline.cli") & {"numpy", "serve", "k8s", "train", "evaluate", "export"} == set()


def test_the_service_loads_no_torch() -> None:
    assert "torch" not in loaded_by("serve.server")


def test_a_run_directory_is_read_without_torch_or_numpy() -> None:
    assert loaded_by("pipeline.spec.run") & {"torch", "numpy"} == set()


@pytest.mark.long
def test_importing_any_module_prints_nothing() -> None:
    here = [path for path in SOURCES if "servers" not in path.parts]  # those run where their peer is installed
    modules = [module_of(path) for path in here if path.stem != "__main__"]
    done = run_python("import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name)", *modules)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""


def test_every_file_stays_under_300_lines() -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in (*SOURCES, *EXAMPLES, *TESTS)}
    assert [f"{path.relative_to(HOUSE)}: {length}" for path, length in lengths.items() if length >= 300] == []


def test_every_function_stays_under_40_lines() -> None:
    long = [
        f"{path.relative_to(HOUSE)}: {node.name}"
        for path in (*SOURCES, *EXAMPLES)
        for node in ast.walk(ast.parse(path.read_bytes()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (node.end_lineno or 0) - node.lineno >= 39
    ]
    assert long == []


def test_every_module_says_what_it_owns() -> None:
    written = [path for path in SOURCES if path.read_text().strip()]
    assert [module_of(path) for path in written if not ast.get_docstring(ast.parse(path.read_bytes()))] == []


def test_every_module_is_named_by_its_subject() -> None:
    names = [path.relative_to(HOUSE).with_suffix("") for path in (*SOURCES, *EXAMPLES, *TESTS)]
    assert [str(name) for name in names if VAGUE & set(name.parts)] == []
