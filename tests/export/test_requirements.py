from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest

from export.requirements import check_requirements
from pipeline.spec.errors import ConfigError

REFERENCE = "some_codec.py:Codec"


def write(root: Path, *imports: str) -> Path:
    (root / "some_codec.py").write_text("\n".join(imports) + "\n\n\nclass Codec: ...\n")
    return root


def test_declared_packages_are_pinned_as_installed_here(tmp_path: Path) -> None:
    root = write(tmp_path, "import json", "import numpy", "import yaml", "from pipeline.spec.page import Drawing")
    assert check_requirements(REFERENCE, root, ("PyYAML>=6",)) == (f"pyyaml=={metadata.version('pyyaml')}",)
    assert check_requirements(REFERENCE, write(tmp_path, "import numpy"), ()) == ()


@pytest.mark.parametrize(
    ("imported", "declared", "sentence"),
    [
        ("yaml", (), r'imports yaml, which the service does not install; declare it .* requires = \("pyyaml",\)'),
        ("no_such_thing", (), "imports no_such_thing, which the service does not install"),
        ("numpy", ("no-such-thing",), "needs no-such-thing, which is not installed here"),
        ("yaml", ("pyyaml<1",), "needs pyyaml<1, but .* is installed here"),
        ("numpy", ("torch",), "`requires` has torch, which no service of ours carries"),
        ("numpy", ("not a name",), "`requires` has 'not a name'; write a package's name"),
    ],
)
def test_what_the_service_could_not_import_is_refused(
    tmp_path: Path, imported: str, declared: tuple[str, ...], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        check_requirements(REFERENCE, write(tmp_path, f"import {imported}"), declared)
