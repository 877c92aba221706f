"""Digests of code for the keys of steps: what cannot change a step's result is not part of them.

Comments, docstrings and formatting do not count, nor do methods of the task and the codec that the step never calls.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Iterator, Sequence, Set
from pathlib import Path

from pipeline.contract.files import digest_bytes
from pipeline.contract.sources import SOURCE_ROOT, package_files, parse_source, project_files

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
}


def project_code(root: Path, references: Sequence[str], unused: Set[str] = frozenset()) -> dict[str, str]:
    """Return a digest of each of the user's files; `unused` are methods that the step never calls."""
    base = root.resolve()
    sources = {path.relative_to(base).as_posix(): path.read_bytes() for path in project_files(root, references)}
    trees = {name: parse_source(source, name) for name, source in sources.items()}
    if any(_reads_source(tree) for tree in trees.values()):
        return {name: digest_bytes(source) for name, source in sources.items()}
    for reference in references:
        file, _, name = reference.partition(":")
        _remove_unused_methods(trees[Path(file).as_posix()], name, unused, trees.values())
    return {name: _digest(tree) for name, tree in trees.items()}


def package_code(module: str) -> dict[str, str]:
    """Return a digest of each of our own files that a module or package imports."""
    paths = {path.relative_to(SOURCE_ROOT).as_posix(): path for path in package_files(module)}
    return {name: _digest(parse_source(path.read_bytes(), name)) for name, path in paths.items()}


def _digest(tree: ast.Module) -> str:
    """Return a digest of the syntax tree without docstrings; dumping it does not include positions."""
    for node in ast.walk(tree):
        if isinstance(node, _Documented) and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:]
    return digest_bytes(ast.dump(tree).encode())


def _reads_source(tree: ast.Module) -> bool:
    if any(name in _SOURCE_READERS for node in ast.walk(tree) for name in _names(node)):
        return True
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call) and _names(node.func) & _FILE_READERS)
    return any(isinstance(node, ast.Name) and node.id == "__file__" for call in calls for node in ast.walk(call))


def _remove_unused_methods(tree: ast.Module, name: str, unused: Set[str], trees: Collection[ast.Module]) -> None:
    """Remove methods from a class where nothing else in the user's code can call them."""
    definitions = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
    if len(definitions) != 1 or not _is_plain_class(definitions[0], tree):
        return
    (kind,) = definitions
    methods = [node for node in kind.body if isinstance(node, ast.FunctionDef)]
    removed = [node for node in methods if node.name in unused and _is_plain_method(node)]
    while removed:
        mentioned = {name for tree in trees for node in _walk_without(tree, removed) for name in _names(node)}
        if mentioned & _REFLECTION:
            return
        callable_ones = [method for method in removed if method.name in mentioned]
        if not callable_ones:
            break
        removed = [method for method in removed if method not in callable_ones]
    kind.body = [node for node in kind.body if node not in removed]


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
