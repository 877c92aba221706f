"""`python -m benchmarks.structure`: print the size of the source tree and its import cycles."""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("pipeline", "train", "export", "serve", "k8s")
SMALL_LINES = 100

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
    print(f"modules: {len(files)}, lines: {sum(lines.values())}")
    print(f"modules under {SMALL_LINES} lines with one importer: {len(small)}")
    print(*(f"  {module} ({lines[module]}) <- {next(iter(importers[module]))}" for module in small), sep="\n")
    print("largest folders:", ", ".join(f"{folder} {count}" for folder, count in folders.most_common(5)))
    print(f"import cycles, type-only imports included: {len(cycles(graph))}")
    print(*(f"  {' '.join(cycle)}" for cycle in cycles(graph)), sep="\n")


if __name__ == "__main__":
    main()
