"""Import the user's modules under a package of their own, so that they share names with installed modules.

In the user's files, an import means the project's file if there is one, as in `python task.py`. Everywhere else the
same name still means what is installed: ONNX Runtime has a `constants.py` too. So the user's `utils.py` is the module
`pipeline.project.utils`, and imports are completed when the user's files are compiled: `import utils` becomes `import
pipeline.project.utils as utils`. By its plain name, which objects pickled elsewhere and `importlib.import_module`
use, a user's module is found after all installed ones.

Each bundle's codec has a package of its own: a service may have two models with different `utils.py`.
"""

from __future__ import annotations

import ast
import importlib
import os
import sys
import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from pipeline.system.files import digest_bytes

PROJECT = "pipeline.project"  # the package of this process's project
_FOLDERS_VARIABLE = "PIPE_PROJECT_FOLDERS"  # for processes that only unpickle the user's objects, as workers do
_packages: dict[str, list[str]] = {}  # each package of user code: its folders, in the order of search
_lock = threading.RLock()  # a service may load one bundle under two names at once


def import_file(path: Path, root: Path, package: str = "") -> ModuleType:
    """Import a file of a project; its imports are searched in `root`, then in its own folder.

    Without `package`, it belongs to the project of this process. A named package is made anew.
    """
    with _lock:
        if package:
            _forget(package)
        else:
            package = _project_package(root)
        _open_package(package, [str(root), str(path.parent)])
        return _import_from(package, path)


def _import_from(package: str, path: Path) -> ModuleType:
    found = next(iter(module_files(_packages[package], [path.stem])), None)
    if found is not None and found.resolve() == path and "." not in path.stem:
        return importlib.import_module(f"{package}.{path.stem}")
    name = f"{package}._{digest_bytes(bytes(path))[:12]}"  # its plain name means another file
    if name not in sys.modules:
        spec = _file_spec(name, path, package)
        sys.modules[name] = module = module_from_spec(spec)
        try:
            spec.loader.exec_module(module)  # type: ignore[union-attr]  # it has ours
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def module_files(folders: Iterable[str | Path], parts: Sequence[str]) -> list[Path]:
    """Return the files that importing a dotted name executes, in the first folder that has any: every `__init__.py`."""
    for folder in folders:
        if files := list(_existing_files(Path(folder), parts)):
            return files
    return []


def _existing_files(folder: Path, parts: Sequence[str]) -> Iterator[Path]:
    for depth in range(1, len(parts) + 1):
        path = folder.joinpath(*parts[:depth])
        candidates = (path / "__init__.py", path.with_name(f"{path.name}.py"))
        yield from [file for file in candidates if file.is_file()][:1]


def is_local(module: str, names: Collection[str], folders: Iterable[str | Path]) -> bool:
    """Return whether `import module`, or `from module import names`, means files in these folders."""
    candidates = [module, *(f"{module}.{name}" for name in names)]
    return any(module_files(folders, candidate.split(".")) for candidate in candidates)


def is_installed(name: str) -> bool:
    """Return whether a top-level module exists outside the user's files."""
    if name in sys.builtin_module_names:
        return True
    finders = [finder for finder in sys.meta_path if not isinstance(finder, _ProjectFinder | _PlainNameFinder)]
    return any(finder.find_spec(name, None) is not None for finder in finders)


def project_folders() -> list[str]:
    """Return the folders of the package `pipeline.project`; in a worker those of the process that started it."""
    if PROJECT not in _packages:
        _packages[PROJECT] = os.environ.get(_FOLDERS_VARIABLE, os.getcwd()).split(os.pathsep)
    _install_finders()
    return _packages[PROJECT]


def _project_package(root: Path) -> str:
    """Return the package of a project; the first one of a process has the name that other processes can import."""
    if PROJECT not in sys.modules:
        _packages[PROJECT] = [str(root)]
        importlib.import_module(PROJECT)
    return PROJECT if _packages[PROJECT][0] == str(root) else f"_project_{digest_bytes(bytes(root))[:12]}"


def _open_package(package: str, folders: Sequence[str]) -> None:
    """Create the package if necessary, and add folders to it."""
    if package not in sys.modules:
        module = ModuleType(package)
        module.__path__ = _packages[package] = []
        module.__spec__ = ModuleSpec(package, None, is_package=True)
        sys.modules[package] = module
        _install_finders()
    path = _packages[package]
    path += [folder for folder in dict.fromkeys(folders) if folder not in path]
    if package == PROJECT:
        os.environ[_FOLDERS_VARIABLE] = os.pathsep.join(path)


def _forget(package: str) -> None:
    for name in [name for name in sys.modules if name == package or name.startswith(f"{package}.")]:
        del sys.modules[name]


def _install_finders() -> None:
    if not any(isinstance(finder, _ProjectFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _ProjectFinder())
        sys.meta_path.append(_PlainNameFinder())


class _ProjectFinder(MetaPathFinder):
    """Finds modules of the packages of user code, and submodules of those imported by their plain name."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        parent, _, name = fullname.rpartition(".")
        package = next((package for package in _packages if fullname.startswith(f"{package}.")), None)
        if package is not None and path is not None:
            file = next(iter(module_files(path, [name])), None)
            return PathFinder.find_spec(fullname, path, target) if file is None else _file_spec(fullname, file, package)
        actual_parent = getattr(sys.modules.get(parent), "__name__", parent)
        if actual_parent != parent and actual_parent.startswith(f"{PROJECT}."):
            return _plain_spec(fullname, f"{actual_parent}.{name}")
        return None


class _PlainNameFinder(MetaPathFinder):
    """Finds the project's modules by their plain names, after all installed modules."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        folders = _packages.get(PROJECT)
        if path is not None or folders is None or PROJECT not in sys.modules:
            return None
        spec = None if module_files(folders, [fullname]) else PathFinder.find_spec(fullname, folders, target)
        if spec is not None and spec.loader is None:  # a folder; most of them contain no modules
            places = spec.submodule_search_locations or ()
            spec = spec if any(any(Path(place).glob("*.py")) for place in places) else None
        if spec is None and not module_files(folders, [fullname]):
            return None
        return _plain_spec(fullname, f"{PROJECT}.{fullname}")


def _file_spec(name: str, file: Path, package: str) -> ModuleSpec:
    folders = [str(file.parent)] if file.name == "__init__.py" else None
    loader = _ProjectLoader(name, str(file), package)
    spec = spec_from_file_location(name, file, loader=loader, submodule_search_locations=folders)
    assert spec is not None
    return spec


class _ProjectLoader(SourceFileLoader):
    """Compiles a user's file with completed imports; nothing is cached on disk, where Python would find it."""

    def __init__(self, fullname: str, path: str, package: str) -> None:
        super().__init__(fullname, path)
        self._package = package

    def get_code(self, fullname: str) -> Any:
        path = self.get_filename(fullname)
        tree = ast.parse(self.get_data(path), path)
        complete_imports(tree, self._package, _packages[self._package])
        return compile(tree, path, "exec", dont_inherit=True)


def complete_imports(tree: ast.Module, package: str, folders: Sequence[str]) -> None:
    """Let absolute imports of the user's files name them in their package."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            node.names = [new for alias in node.names for new in _complete_alias(alias, package, folders)]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            module = node.module or ""  # never empty without a level
            is_own = is_local(module, [alias.name for alias in node.names], folders)
            node.module = f"{package}.{module}" if is_own else module


def _complete_alias(alias: ast.alias, package: str, folders: Sequence[str]) -> list[ast.alias]:
    if not is_local(alias.name, (), folders):
        return [alias]
    top = alias.name.partition(".")[0]
    names = [ast.alias(f"{package}.{alias.name}", alias.asname or top)]
    if not alias.asname and alias.name != top:  # `import a.b` imports a.b and then binds a
        names.append(ast.alias(f"{package}.{top}", top))
    return [ast.copy_location(name, alias) for name in names]


def _plain_spec(fullname: str, target: str) -> ModuleSpec:
    return ModuleSpec(fullname, _PlainNameLoader(target))


class _PlainNameLoader(Loader):
    """Gives a module of the project a second name."""

    def __init__(self, target: str) -> None:
        self._target = target

    def create_module(self, spec: ModuleSpec) -> ModuleType:  # noqa: ARG002
        module = importlib.import_module(self._target)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # the import of the second name has replaced it
