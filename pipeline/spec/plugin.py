"""Importing the user's `file.py:Class` without letting it shadow, or be shadowed by, anything."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

from pipeline.spec.digest import digest_bytes
from pipeline.spec.errors import ConfigError


def load_class(reference: str, root: Path, alias: str = "") -> Any:
    """The class a reference names; files beside it are importable, after everything installed.

    An alias names the module where one process loads several files of one name: by their content.
    """
    file, _, name = reference.partition(":")
    path = (root / file).resolve()
    if not path.is_file():
        raise ConfigError(f"{reference}: no file {file} in {root}")
    module = _execute(path, alias) if alias else _load(path, root.resolve())
    if not hasattr(module, name):
        raise ConfigError(f"{reference}: {file} has no class {name}")
    return getattr(module, name)


def _load(path: Path, root: Path) -> Any:
    for folder in (str(root), str(path.parent)):
        if folder not in sys.path:
            sys.path.append(folder)  # last: a user's train.py must not shadow ours
    name = path.stem
    loaded = sys.modules.get(name)
    if loaded is not None and getattr(loaded, "__file__", None) == str(path):
        return loaded
    if loaded is not None or _taken(name, path):
        name = f"_{name}_{digest_bytes(str(path).encode())[:12]}"  # the plain name belongs to somebody else
        if name in sys.modules:
            return sys.modules[name]
    return _execute(path, name)


def _execute(path: Path, name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # a script without a main guard must not end the step as if it were done
        del sys.modules[name]
        text = " ".join(str(error).split())
        raise ConfigError(f"{path.name}: import failed: {type(error).__name__}: {text}") from error
    return module


def _taken(name: str, path: Path) -> bool:
    """Whether `import name` means something else than this file, though nobody imported it yet."""
    spec = importlib.util.find_spec(name)
    return spec is not None and spec.origin != str(path)
