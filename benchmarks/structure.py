"""`python -m benchmarks.structure`: print the size of source, tests, documents and settings, and import cycles."""

from __future__ import annotations

import ast
import subprocess
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from pipeline.contract.config import Config
from pipeline.contract.settings.section import Section

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("pipeline", "train", "export", "serve", "k8s")
SMALL_LINES = 100
WALLS = ("export/llm", "serve/llm", "serve/wire", "tests/export/llm", "tests/serve/llm", "tests/serve/wire")

Graph = Mapping[str, set[str]]


def source_files() -> list[Path]:
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_names(path: Path) -> Iterator[str]:
    """Yield every dotted name a file imports, including type-only imports and those inside functions."""
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def import_graph(files: list[Path]) -> dict[str, set[str]]:
    """Map each module to the modules of `files` it imports. To import `a.b` runs `a` too, except from inside `a`."""
    modules = {module_name(path) for path in files}
    graph: dict[str, set[str]] = {}
    for path in files:
        module = module_name(path)
        graph[module] = set()
        for name in imported_names(path):
            parts = name.split(".")
            prefixes = [".".join(parts[:length]) for length in range(1, len(parts) + 1)]
            targets = [prefix for prefix in prefixes if prefix in modules]
            packages = [target for target in targets[:-1] if not f"{module}.".startswith(f"{target}.")]
            graph[module].update(packages, targets[-1:])
        graph[module].discard(module)
    return graph


def cycles(graph: Graph) -> list[list[str]]:
    """Return the strongly connected components of more than one module (Tarjan's algorithm)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    components: list[list[str]] = []

    def visit(module: str) -> None:
        index[module] = low[module] = len(index)
        stack.append(module)
        for target in sorted(graph[module]):
            if target not in index:
                visit(target)
                low[module] = min(low[module], low[target])
            elif target in stack:
                low[module] = min(low[module], index[target])
        if low[module] == index[module]:
            component = stack[stack.index(module) :]
            del stack[stack.index(module) :]
            if len(component) > 1:
                components.append(sorted(component))

    for module in sorted(graph):
        if module not in index:
            visit(module)
    return components


def tracked_files(pattern: str) -> list[Path]:
    listed = subprocess.run(["git", "ls-files", pattern], cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


def count_lines(files: Iterable[Path]) -> str:
    """Return the number of lines, and how many are not behind a wall: text generation and the wire."""
    sizes = {path.relative_to(ROOT).as_posix(): len(path.read_text().splitlines()) for path in files}
    core = sum(size for name, size in sizes.items() if not name.startswith(WALLS))
    return f"{sum(sizes.values())}, without text generation and the wire {core}"


def count_settings(section: type[Section]) -> int:
    kinds = [field.annotation for field in section.model_fields.values()]
    return sum(count_settings(kind) if isinstance(kind, type) and issubclass(kind, Section) else 1 for kind in kinds)


def main() -> None:
    files = source_files()
    graph = import_graph(files)
    importers: dict[str, set[str]] = defaultdict(set)
    for module, targets in graph.items():
        for target in targets:
            importers[target].add(module)
    lines = {module_name(path): len(path.read_text().splitlines()) for path in files}
    named_files = [path for path in files if path.stem not in ("__init__", "__main__")]
    small = sorted(
        module
        for module in map(module_name, named_files)
        if lines[module] < SMALL_LINES and len(importers[module]) == 1
    )
    folders = Counter(path.parent.relative_to(ROOT).as_posix() for path in files)
    print(f"modules: {len(files)}, lines: {count_lines(files)}")
    print(f"settings: {count_settings(Config)}")
    print(f"words of documents: {sum(len(path.read_text().split()) for path in tracked_files('*.md'))}")
    print(f"lines of tests: {count_lines(tracked_files('tests/*.py'))}")
    print(f"modules under {SMALL_LINES} lines with one importer: {len(small)}")
    print(*(f"  {module} ({lines[module]}) <- {next(iter(importers[module]))}" for module in small), sep="\n")
    print("largest folders:", ", ".join(f"{folder} {count}" for folder, count in folders.most_common(5)))
    print(f"import cycles, type-only imports included: {len(cycles(graph))}")
    print(*(f"  {' '.join(cycle)}" for cycle in cycles(graph)), sep="\n")


if __name__ == "__main__":
    main()
