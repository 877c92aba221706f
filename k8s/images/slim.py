"""Remove packages' files that no service imports, and compile the rest. Runs inside the build of the serving image.

The image's root file system is read-only, so modules that are not compiled here would be compiled at every start.
"""

from __future__ import annotations

import compileall
import py_compile
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path


def main(roots: Sequence[str]) -> None:
    for root in map(Path, roots):
        for folder in unneeded_folders(root):
            shutil.rmtree(folder)
        # Like pip, accept files that do not compile. The sources never change, so their dates need no comparison.
        compileall.compile_dir(
            root, quiet=2, maxlevels=50, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH
        )


def unneeded_folders(root: Path) -> Iterator[Path]:
    """Yield the tests of installed packages."""
    for packages in sorted(root.glob("lib/python*/site-packages")):
        yield from (folder for folder in sorted(packages.glob("*/**/tests")) if folder.is_dir())


if __name__ == "__main__":
    main(sys.argv[1:])
