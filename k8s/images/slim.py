"""Run inside a build: takes out of an environment what no service imports, and compiles the rest once and for all.

The root file system is read-only where the image runs, so what is not compiled here is compiled at every start.
"""

from __future__ import annotations

import compileall
import py_compile
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

# Of the Kubernetes client, which kserve imports: its twin for asyncio, as large as all else of it and imported by none.
_UNUSED = ("kubernetes/aio",)


def main(places: Sequence[str]) -> None:
    for place in map(Path, places):
        for folder in unneeded_folders(place):
            shutil.rmtree(folder)
        # pip takes packages with files that do not compile; so do we. The sources never change: no dates are compared.
        compileall.compile_dir(
            place, quiet=2, maxlevels=50, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH
        )


def unneeded_folders(place: Path) -> Iterator[Path]:
    """Folders of installed packages: their own tests, and what is named above."""
    for packages in sorted(place.glob("lib/python*/site-packages")):
        yield from (packages / name for name in _UNUSED if (packages / name).is_dir())
        yield from (folder for folder in sorted(packages.glob("*/**/tests")) if folder.is_dir())


if __name__ == "__main__":
    main(sys.argv[1:])
