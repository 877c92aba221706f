"""Remove packages' files that no service reads, and compile the rest. Runs inside the build of the serving image.

The image's root file system is read-only, so modules that are not compiled here would be compiled at every start.
"""

from __future__ import annotations

import compileall
import py_compile
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

# Tests, and tools that make models.
_UNNEEDED_FOLDERS = (
    "*/**/tests", "numpy/distutils", "numpy/f2py", "onnxruntime/quantization", "onnxruntime/tools",
    "onnxruntime/transformers",
)  # fmt: skip
_SOURCES = {".a", ".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp", ".pxd", ".pyi", ".pyx"}  # there is no compiler


def main(roots: Sequence[str]) -> None:
    for root in map(Path, roots):
        for packages in root.glob("lib/python*/site-packages"):
            remove_unneeded(packages)
        # Like pip, accept files that do not compile. The sources never change, so their dates need no comparison.
        compileall.compile_dir(
            root, quiet=2, maxlevels=50, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH
        )


def remove_unneeded(packages: Path) -> None:
    for pattern in _UNNEEDED_FOLDERS:
        for folder in sorted(packages.glob(pattern)):
            if folder.is_dir():
                shutil.rmtree(folder)
    for path in sorted(packages.rglob("*")):
        if path.suffix in _SOURCES and path.is_file():
            path.unlink()


if __name__ == "__main__":
    main(sys.argv[1:])
