from __future__ import annotations

from importlib.metadata import version

import pytest
from packaging.requirements import Requirement

from k8s.lock import applies, locked
from pipeline.spec.errors import StageError


def test_the_closure_follows_extras_and_leaves_out_those_not_asked_for() -> None:
    plain, standard = locked(["uvicorn"]), locked(["uvicorn[standard]"])
    assert f"uvicorn=={version('uvicorn')}" in plain
    assert "httptools" not in " ".join(plain)
    assert set(plain) < set(standard)
    assert f"httptools=={version('httptools')}" in standard


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("a", True),
        ("a; sys_platform == 'linux' and platform_machine == 'x86_64'", True),
        ("a; sys_platform == 'darwin'", False),
        ("a; extra == 'more'", False),
    ],
)
def test_markers_speak_of_the_image_not_of_this_machine(text: str, counts: bool) -> None:
    assert applies(Requirement(text), "") is counts


def test_a_missing_distribution_is_named() -> None:
    with pytest.raises(StageError, match="not-installed-anywhere, which is not installed"):
        locked(["not-installed-anywhere"])


def test_an_installed_version_that_does_not_fit_is_named() -> None:
    with pytest.raises(StageError, match="the image needs numpy<1"):
        locked(["numpy<1"])
