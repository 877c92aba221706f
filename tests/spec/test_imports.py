from __future__ import annotations

import subprocess
import sys

import pytest

from pipeline.spec.imports import without

_VALIDATOR = "kubernetes_validate"


def test_a_package_counts_as_not_installed_within_and_is_there_again_after() -> None:
    sys.modules.pop("colorsys", None)
    with without("colorsys"):
        with pytest.raises(ImportError):
            import colorsys
        assert "colorsys" in sys.modules
    import colorsys

    assert sys.modules["colorsys"] is colorsys


def test_what_is_in_memory_already_stays() -> None:
    with without("sys"):
        import sys as found
    assert found is sys


@pytest.mark.parametrize(
    "program",
    [
        "from serve.__main__ import service_class; service_class()",
        "from k8s.api import client_package; client_package()",
    ],
)
def test_neither_the_service_nor_a_command_on_a_cluster_loads_the_validator_of_manifests(program: str) -> None:
    """It is installed here, where tests use it, and costs a service a second of its start."""
    told = f"import sys; print('kubernetes' in sys.modules, {_VALIDATOR!r} in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", f"{program}\n{told}"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout.split() == ["True", "False"], done.stderr
