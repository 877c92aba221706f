"""Our own files that a module or package imports."""

from __future__ import annotations

from pathlib import Path

from pipeline.system.sources import SOURCE_ROOT, import_closure


def package_files(module: str) -> list[Path]:
    start = SOURCE_ROOT / Path(*module.split("."))
    entry = sorted(start.glob("*.py")) if start.is_dir() else [start.with_suffix(".py")]
    return sorted(import_closure(entry, SOURCE_ROOT, [SOURCE_ROOT]))
