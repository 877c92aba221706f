"""Which source files a step's result depends on: the transitive closure of local imports."""

from __future__ import annotations

import ast
import functools
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

from pipeline.contract.errors import ConfigError
from pipeline.contract.files import digest_file, digest_mapping

HOUSE = Path(__file__).resolve().parents[2]  # the folder our packages stand in
PACKAGES = ("pipeline", "train", "export", "serve", "k8s")


def house_sources(package: str) -> dict[str, str]:
    """Digests of the files of ours that a package reaches by imports, by path."""
    start = HOUSE / Path(*package.split("."))
    entry = sorted(start.glob("*.py")) if start.is_dir() else [start.with_suffix(".py")]
    return _digests(HOUSE, _closure(entry, HOUSE, [HOUSE], only=PACKAGES))


def project_sources(root: Path, *references: str) -> dict[str, str]:
    """Digests of the user's files that a task or codec reaches by imports, by path below the project."""
    entry = []
    for reference in references:
        file, _, name = reference.partition(":")
        path = (root / file).resolve()
        if not path.is_file():
            raise ConfigError(f"{reference}: no file {file} in {root}")
        if not path.is_relative_to(root.resolve()):
            raise ConfigError(f"{reference}: {file} lies outside the project {root}; move it there")
        if name not in _top_level_names(path):
            raise ConfigError(f"{reference}: {file} has no class {name}")
        entry.append(path)
    base = root.resolve()
    # The folders that pipeline.contract.task puts on the path, in its order.
    folders = list(dict.fromkeys([base, *(path.parent for path in entry)]))
    return _digests(base, _closure(entry, base, folders, only=None))


def outside_imports(root: Path, *references: str) -> set[str]:
    """Top-level modules the user's files import that are neither theirs nor ours nor Python's own."""
    base = root.resolve()
    files = [base / name for name in project_sources(root, *references)]
    folders = {base, *(path.parent for path in files)}
    known = {*sys.stdlib_module_names, *PACKAGES}
    found = {module.partition(".")[0] for path in files for module in _imported(path, base)} - known
    return {name for name in found if not any(list(_walk(folder, [name])) for folder in folders)}


def code_digest(root: Path, *references: str) -> str:
    """One digest of the user's code: the first link of the chain."""
    return digest_mapping(project_sources(root, *references))


def _digests(base: Path, paths: set[Path]) -> dict[str, str]:
    return {path.relative_to(base).as_posix(): digest_file(path) for path in sorted(paths)}


def _closure(entry: list[Path], base: Path, folders: list[Path], only: tuple[str, ...] | None) -> set[Path]:
    found: set[Path] = set()
    modules: set[str] = set()
    waiting = list(entry)
    while waiting:
        path = waiting.pop()
        if path in found:
            continue
        found.add(path)
        for module in _imported(path, base):
            if module in modules or (only is not None and module.partition(".")[0] not in only):
                continue
            modules.add(module)
            waiting.extend(_files_of(module, folders, path))
    return found


def _imported(path: Path, base: Path) -> tuple[str, ...]:
    return _imports_in(path.read_bytes(), path.name, path.parent.relative_to(base).parts)


@functools.cache  # by content: a plan and its run ask for every file a dozen times
def _imports_in(source: bytes, file: str, package: tuple[str, ...]) -> tuple[str, ...]:
    """Every module name a source imports, anywhere in it; `from a import b` may mean the module a.b."""
    found: list[str] = []
    for node in _statements(_parse(source, file)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*above, *([node.module] if node.module else [])])
            found += [module] if module else []
            found += [f"{module}.{alias.name}".lstrip(".") for alias in node.names]
    return tuple(found)


def _statements(node: ast.AST) -> Iterator[ast.stmt]:
    """All of them, however deep; not the expressions, which are nine of ten nodes and import nothing."""
    for name in ("body", "orelse", "finalbody", "handlers", "cases"):
        for below in getattr(node, name, ()):
            if isinstance(below, ast.stmt):
                yield below
            yield from _statements(below)


def _files_of(module: str, folders: list[Path], importer: Path) -> Iterator[Path]:
    """Files that importing a dotted name runs, in the first folder that has it: every __init__ and the module."""
    parts = module.split(".")
    for place in folders:
        files = _ours(module) if place == HOUSE else list(_walk(place, parts))
        if files:
            if place != HOUSE:
                _refuse_shadowed(parts[0], files[0], importer)
            yield from files
            return


@functools.cache  # which files there are does not change under a command of ours, only what is in them
def _ours(module: str) -> list[Path]:
    return list(_walk(HOUSE, module.split(".")))


def _walk(place: Path, parts: list[str]) -> Iterator[Path]:
    for depth in range(1, len(parts) + 1):
        path = place.joinpath(*parts[:depth])
        for file in (path / "__init__.py", path.with_suffix(".py")):
            if file.is_file():
                yield file


def _refuse_shadowed(name: str, file: Path, importer: Path) -> None:
    """A local module that Python would not import, because an installed one has its name, is a trap."""
    taken = name in sys.stdlib_module_names or name in PACKAGES
    if not taken and (origin := _installed(name)):
        taken = Path(origin).resolve() != file.resolve()  # a module may be linked into several projects
    if taken:
        raise ConfigError(
            f"{importer.name} imports `{name}`, a name already taken outside the project; rename your {name}.py"
        )


def _installed(name: str) -> str | None:
    """The file an import would run; of modules loaded already, only those that belong to Python's installation."""
    loaded = sys.modules.get(name)
    if loaded is None:
        spec = importlib.util.find_spec(name)
        return spec.origin if spec else None
    origin = getattr(loaded, "__file__", None)
    return origin if origin and Path(origin).is_relative_to(sys.prefix) else None


def _top_level_names(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(_parse(path.read_bytes(), path.name)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names.update(alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def _parse(source: bytes, file: str) -> ast.Module:
    try:
        return ast.parse(source)
    except SyntaxError as error:
        raise ConfigError(f"{file}, line {error.lineno}: {error.msg}") from error
