from __future__ import annotations

from importlib.metadata import version

import pytest
from packaging.requirements import Requirement

from k8s.images.requirements import applies, locked, locked_requirements
from pipeline.contract.errors import StageError


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


def names_of(accelerator: str, extra: str) -> dict[str, str]:
    return {line.partition("==")[0]: line.partition("==")[2] for line in locked_requirements(accelerator, extra)}


def test_an_image_for_cpu_has_the_runtime_without_cuda() -> None:
    names = names_of("cpu", "serve")
    assert "onnxruntime" in names
    assert not [name for name in names if "gpu" in name or "nvidia" in name]


def test_an_image_for_gpus_asks_for_cuda_with_the_runtime() -> None:
    names = names_of("gpu", "serve")
    assert "onnxruntime-gpu[cuda,cudnn]" in names
    assert "onnxruntime" not in names


def test_the_training_image_has_what_the_extra_names_by_other_extras_and_not_ourselves() -> None:
    names = names_of("cpu", "train")
    assert {"torch", "onnx", "kserve", "onnxruntime", "safetensors"} <= set(names)
    assert "pipe-road" not in names
    assert "+" not in names["torch"]


def test_a_build_for_cpu_that_pip_would_take_for_the_newer_is_ruled_out_for_gpus() -> None:
    public = names_of("cpu", "train")["torch"]
    requirement = Requirement(f"torch=={names_of('gpu', 'train')['torch']}")
    assert requirement.specifier.contains(public)
    assert requirement.specifier.contains(f"{public}+cu128")
    assert not requirement.specifier.contains(f"{public}+cpu")
