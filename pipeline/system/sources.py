"""Find the source files that a step's result depends on, and compute their digests.

The files are those that the code imports, and what these import. For provenance, every byte of them counts. For the key
of a step, comments, docstrings and formatting do not count, nor do methods of task and codec that the step never calls,
nor functions, classes and constants that only these use.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence, Set
from pathlib import Path
from typing import NamedTuple

from pipeline.system.errors import ConfigError
from pipeline.system.files import digest_bytes, digest_file, digest_mapping
from pipeline.system.imports import is_installed, is_local, module_files

SOURCE_ROOT = Path(__file__).resolve().parents[2]  # the folder that contains our packages
PACKAGES = ("pipeline", "train", "export", "serve", "k8s")


def package_sources(*packages: str) -> dict[str, str]:
    """Return the digests of all our own files in these packages, by path."""
    folders = [SOURCE_ROOT / Path(*package.split(".")) for package in packages]
    return _digests(SOURCE_ROOT, (path for folder in folders for path in folder.rglob("*.py")))


def project_sources(root: Path, *references: str) -> dict[str, str]:
    """Return the digests of the user's files that task and codec import, by path below the project."""
    return _digests(root.resolve(), project_files(root, references))


def project_files(root: Path, references: Iterable[str]) -> list[Path]:
    """Return the user's files that task and codec import; names that cannot mean these files are errors."""
    base = root.resolve()
    folders = _search_folders(root, references)
    entry = [(base / reference.partition(":")[0]).resolve() for reference in references]
    files = sorted(import_closure(entry, base, folders))
    _check_names(files, base, folders)
    return files


def _search_folders(root: Path, references: Iterable[str]) -> list[Path]:
    """Return the folders in which pipeline.system.imports searches, in its order."""
    base, folders = root.resolve(), [root.resolve()]
    for reference in references:
        file, _, name = reference.partition(":")
        path = (root / file).resolve()
        if not path.is_file():
            raise ConfigError(f"{reference}: no file {file} in {root}")
        if not path.is_relative_to(base):
            raise ConfigError(f"{reference}: {file} lies outside the project {root}; move it there")
        if name not in _top_level_names(path.read_bytes(), path.name):
            raise ConfigError(f"{reference}: {file} has no class {name}")
        folders.append(path.parent)
    return list(dict.fromkeys(folders))


_MODULES_OF_READERS = {"read_dataset": "datasets", "read_images": "PIL", "read_table": "pyarrow"}


def third_party_imports(root: Path, *references: str) -> dict[str, str]:
    """Return the installed modules that the user's files import, by top-level name, with the first file that does.

    The modules that a reader of `pipeline` imports count as well.
    """
    base, folders = root.resolve(), _search_folders(root, references)
    importers: dict[str, str] = {}
    for path in project_files(root, references):
        for statement in _cached_imports(path, base):
            for name in _MODULES_OF_READERS.keys() & set(statement.names if statement.top == "pipeline" else ()):
                importers.setdefault(_MODULES_OF_READERS[name], path.relative_to(base).as_posix())
            if statement.top not in (*sys.stdlib_module_names, *PACKAGES) and not (
                statement.is_relative or is_local(statement.module, statement.names, folders)
            ):
                importers.setdefault(statement.top, path.relative_to(base).as_posix())
    return importers


def code_digest(root: Path, *references: str) -> str:
    """Return one digest of the user's code."""
    return digest_mapping(project_sources(root, *references))


def _digests(base: Path, paths: Iterable[Path]) -> dict[str, str]:
    return {path.relative_to(base).as_posix(): digest_file(path) for path in sorted(paths)}


class _Import(NamedTuple):
    """One import: `import module`, or `from module import names`."""

    module: str  # by its name from the project's folder; "" in `from . import name` there
    names: tuple[str, ...] = ()
    is_relative: bool = False

    @property
    def top(self) -> str:
        return self.module.partition(".")[0]

    @property
    def modules(self) -> list[str]:
        """Return the modules it may mean: `from a import b` may mean a.b."""
        return [*filter(None, [self.module]), *(f"{self.module}.{name}".lstrip(".") for name in self.names)]


def import_closure(entry: Iterable[Path], base: Path, folders: Sequence[Path]) -> set[Path]:
    """Return these files and all in the folders that they import, directly or not."""
    closure: set[Path] = set()
    modules: set[str] = set()
    waiting = list(entry)
    while waiting:
        path = waiting.pop()
        if path in closure:
            continue
        closure.add(path)
        for module in (module for statement in _cached_imports(path, base) for module in statement.modules):
            if module not in modules:
                modules.add(module)
                waiting.extend(module_files(folders, module.split(".")))
    return closure


def _cached_imports(path: Path, base: Path) -> tuple[_Import, ...]:
    return _imports_in(path.read_bytes(), path.name, path.parent.relative_to(base).parts)


@functools.cache  # by content: a plan and its run need every file a dozen times
def _imports_in(source: bytes, file: str, package: tuple[str, ...]) -> tuple[_Import, ...]:
    imports: list[_Import] = []
    for node in _statements(parse_source(source, file)):
        if isinstance(node, ast.Import):
            imports += [_Import(alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parents = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*parents, *([node.module] if node.module else [])])
            imports.append(_Import(module, tuple(alias.name for alias in node.names), node.level > 0))
    return tuple(imports)


def _statements(node: ast.AST) -> Iterator[ast.stmt]:
    """Yield all statements at any depth; expressions, nine of ten nodes, contain no import."""
    for name in ("body", "orelse", "finalbody", "handlers", "cases"):
        for child in getattr(node, name, ()):
            if isinstance(child, ast.stmt):
                yield child
            yield from _statements(child)


# A task needs the first three; the others are part of the interpreter, which never searches for them.
_RESERVED = {"numpy", "torch", "pipeline", *sys.builtin_module_names}


def _check_names(files: Iterable[Path], base: Path, folders: Sequence[Path]) -> None:
    """Reject all files that an import does not mean, although they have the name of the module that it means."""
    problems: dict[str, str] = {}
    for path in files:
        for statement in _cached_imports(path, base):
            if not statement.is_relative and (problem := _collision(statement, folders)):
                problems.setdefault(statement.top, f"{path.relative_to(base).as_posix()} imports {problem}")
    if problems:
        names = ", ".join(f"`{name}`" for name in problems)
        raise ConfigError(
            f"files of the project have names of other modules: {'; '.join(problems.values())}; to fix it: rename "
            f"the project's {names}"
        )


def _collision(statement: _Import, folders: Sequence[Path]) -> str:
    """Return what is imported although the project's file of that name cannot have it; empty without a collision."""
    module, names = statement.module, statement.names
    if not is_local(module, names, folders):
        return ""
    if statement.top in _RESERVED:
        return f"`{module}`"
    if not names and _exact_file(module, folders) is None:
        missing = f"`{module}`"
    else:
        missing = next((f"`{name}` from `{module}`" for name in names if not _defines(module, name, folders)), "")
    return missing if missing and is_installed(statement.top) else ""


def _defines(module: str, name: str, folders: Sequence[Path]) -> bool:
    """Return whether a module of the project may have a name; one with a wildcard import may have any."""
    if name == "*" or _exact_file(f"{module}.{name}", folders):
        return True
    file = _exact_file(module, folders)
    if file is None:
        return False
    return not _top_level_names(file.read_bytes(), file.name).isdisjoint({name, "*", "__getattr__"})


def _exact_file(module: str, folders: Sequence[Path]) -> Path | None:
    """Return the file of a module itself; None where only a package above it is in the project."""
    parts = Path(*module.split("."))
    own = {place for folder in folders for place in (folder / parts / "__init__.py", folder / f"{parts}.py")}
    return next((file for file in module_files(folders, parts.parts) if file in own), None)


@functools.cache  # by content
def _top_level_names(source: bytes, file: str) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(parse_source(source, file)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names.update(alias.asname or alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def parse_source(source: bytes, file: str) -> ast.Module:
    try:
        return ast.parse(source)
    except SyntaxError as error:
        raise ConfigError(f"{file}, line {error.lineno}: {error.msg}") from error


_Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef

# By these, code may read source text: then every byte counts.
_SOURCE_READERS = {"inspect", "linecache", "tokenize", "ast", "__doc__", "getsource"}
_FILE_READERS = {"open", "read_text", "read_bytes"}
# By these, code may reach a method without naming it: then every method counts.
_REFLECTION = {
    "getattr",
    "vars",
    "dir",
    "eval",
    "exec",
    "globals",
    "locals",
    "__dict__",
    "__getattr__",
    "__getattribute__",
    "__init_subclass__",
    "__subclasses__",
}


def project_code(
    root: Path, references: Sequence[str], unused: Set[str] = frozenset(), named: Set[str] = frozenset()
) -> dict[str, str]:
    """Return a digest of each of the user's files.

    `unused` are members that the step never uses; of those in `named`, it only looks whether they exist.
    """
    base = root.resolve()
    sources = {path.relative_to(base).as_posix(): path.read_bytes() for path in project_files(root, references)}
    return dict(_code_digests(tuple(sources.items()), tuple(references), frozenset(unused), frozenset(named)))


@functools.cache  # by content: `pipe run` decides every step three times
def _code_digests(
    sources: tuple[tuple[str, bytes], ...], references: tuple[str, ...], unused: frozenset[str], named: frozenset[str]
) -> dict[str, str]:
    if any(_reads_source(source, name) for name, source in sources):
        return {name: digest_bytes(source) for name, source in sources}
    trees = {name: parse_source(source, name) for name, source in sources}
    kinds = [
        node
        for file, _, name in (reference.partition(":") for reference in references)
        for node in trees[Path(file).as_posix()].body
        if isinstance(node, ast.ClassDef) and node.name == name
    ]
    removed = _unused_nodes(kinds, trees.values(), unused | named)
    for kind in kinds:
        left = (node if node not in removed else ast.Global([_member(node)]) for node in kind.body)
        kind.body = [node for node in left if not isinstance(node, ast.Global) or node.names[0] in named]
    for tree in trees.values():
        tree.body = [node for node in tree.body if node not in removed]
    return {name: digest_tree(tree) for name, tree in trees.items()}


def digest_tree(tree: ast.Module) -> str:
    """Return a digest of the syntax tree without docstrings; dumping it does not include positions."""
    for node in ast.walk(tree):
        if isinstance(node, _Documented) and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:]
    return digest_bytes(ast.dump(tree).encode())


@functools.cache  # by content
def _reads_source(source: bytes, file: str) -> bool:
    tree = parse_source(source, file)
    if any(name in _SOURCE_READERS for node in ast.walk(tree) for name in _names(node)):
        return True
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call) and _names(node.func) & _FILE_READERS)
    return any(isinstance(node, ast.Name) and node.id == "__file__" for call in calls for node in ast.walk(call))


def _unused_nodes(kinds: Sequence[ast.ClassDef], trees: Collection[ast.Module], unused: Set[str]) -> list[ast.stmt]:
    """Return the members of these classes, and the definitions at the top of files, that nothing else can use."""
    plain = [kind for tree in trees for kind in kinds if kind in tree.body and _is_plain_class(kind, tree)]
    removed = [node for kind in plain for node in kind.body if _member(node) in unused]
    removed += [node for tree in trees for node in tree.body if node not in kinds and _member(node)]
    while removed:
        mentioned = {name for tree in trees for node in _walk_without(tree, removed) for name in _mentions(node)}
        if mentioned & _REFLECTION:
            return []
        used = [node for node in removed if _member(node) in mentioned]
        if not used:
            break
        removed = [node for node in removed if node not in used]
    return removed


def _member(node: ast.stmt) -> str:
    """Return the name of a definition that runs no other code; empty for anything else."""
    match node:
        case ast.FunctionDef(name=name) if _is_plain_method(node):
            return name
        case (
            ast.Assign(targets=[ast.Name(id=name)], value=value) | ast.AnnAssign(target=ast.Name(id=name), value=value)
        ):
            return name if value is not None and _is_literal(value) else ""
        case ast.ClassDef(name=name, decorator_list=[], keywords=[], bases=bases, body=body):
            is_plain = all(isinstance(base, ast.Name | ast.Attribute) for base in bases) and all(map(_is_inert, body))
            return name if is_plain else ""
    return ""


def _is_inert(node: ast.stmt) -> bool:
    """Return whether a statement in the body of a class runs no code."""
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    is_field = isinstance(node, ast.AnnAssign) and node.value is None and isinstance(node.annotation, ast.Name)
    return is_text or is_field or isinstance(node, ast.Pass) or bool(_member(node))


def _mentions(node: ast.AST) -> set[str]:
    """Return the names that a node uses; an import alone does not use what it names."""
    if isinstance(node, ast.ImportFrom):
        return {alias.name for alias in node.names if alias.asname or alias.name in _REFLECTION}
    return _names(node)


def _is_literal(value: ast.expr) -> bool:
    try:
        ast.literal_eval(value)
    except (ValueError, TypeError):
        return False
    return True


def _walk_without(tree: ast.AST, removed: Sequence[ast.AST]) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        if node not in removed:
            yield node
            yield from _walk_without(node, removed)


def _names(node: ast.AST) -> set[str]:
    """Return the names that a node uses, and the texts that may stand for a name."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return {name}
        case ast.MatchClass(kwd_attrs=names):
            return set(names)
        case ast.Constant(value=str(text)):
            return {text}
        case ast.Import(names=aliases):
            return {alias.name.partition(".")[0] for alias in aliases}
        case ast.ImportFrom(module=module, names=aliases):
            return {(module or "").partition(".")[0], *(alias.name for alias in aliases)}
        case ast.FunctionDef(name=name) if name in _REFLECTION:
            return {name}
    return set()


def _is_plain_class(kind: ast.ClassDef, tree: ast.Module) -> bool:
    """Return whether the class is all there is: no decorator, no base besides our protocols, no second definition."""
    ours = {
        alias.asname or alias.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module == "pipeline"
        for alias in node.names
    }
    stored = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    is_replaced = any(node.id == kind.name for node in stored)
    is_replaced |= sum(isinstance(node, ast.ClassDef) and node.name == kind.name for node in tree.body) > 1
    has_other_bases = any(not isinstance(base, ast.Name) or base.id not in ours for base in kind.bases)
    return not (kind.decorator_list or kind.keywords or has_other_bases or is_replaced)


def _is_plain_method(method: ast.FunctionDef) -> bool:
    """Return whether defining the method runs none of its code: decorators and defaults are evaluated at once."""
    plain = ("staticmethod", "classmethod")
    is_decorated = any(not isinstance(node, ast.Name) or node.id not in plain for node in method.decorator_list)
    signature = [method.args, *filter(None, [method.returns])]
    nodes: Iterable[ast.AST] = (node for root in signature for node in ast.walk(root))
    effects = (ast.Call, ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom)
    return not is_decorated and not any(isinstance(node, effects) for node in nodes)
