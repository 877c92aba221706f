from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution, version
from types import SimpleNamespace
from typing import Any

import pytest
from packaging.requirements import Requirement

from k8s.images import contents
from k8s.images.contents import (
    applies_to_image,
    lock_requirements,
    locked_requirements,
    packages_from_pins,
    serving_requirements,
)
from pipeline.system.errors import StageError


def test_the_closure_follows_only_requested_extras() -> None:
    plain, extended = lock_requirements(("httpx",)), lock_requirements(("httpx[http2]",))
    assert f"httpx=={version('httpx')}" in plain
    assert "hpack" not in " ".join(plain)
    assert set(plain) < set(extended)
    assert f"hpack=={version('hpack')}" in extended


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("a", True),
        ("a; sys_platform == 'linux' and platform_machine == 'x86_64'", True),
        ("a; sys_platform == 'darwin'", False),
        ("a; extra == 'more'", False),
    ],
)
def test_markers_are_evaluated_for_the_image(text: str, counts: bool) -> None:
    assert applies_to_image(Requirement(text), "") is counts


def test_a_missing_distribution_is_named() -> None:
    with pytest.raises(StageError, match="not-installed-anywhere, which is not installed"):
        lock_requirements(("not-installed-anywhere",))


def test_an_unsuitable_installed_version_is_named() -> None:
    with pytest.raises(StageError, match="the image needs numpy<1"):
        lock_requirements(("numpy<1",))


def names_of(accelerator: str, extra: str) -> dict[str, str]:
    return {line.partition("==")[0]: line.partition("==")[2] for line in locked_requirements(accelerator, extra)}


def test_an_image_for_cpu_has_the_runtime_without_cuda() -> None:
    names = names_of("cpu", "serve")
    assert "onnxruntime" in names
    assert not [name for name in names if "gpu" in name or "nvidia" in name]


def test_an_image_for_gpus_has_the_runtime_with_cuda() -> None:
    names = names_of("gpu", "serve")
    assert "onnxruntime-gpu[cuda,cudnn]" in names
    assert "onnxruntime" not in names


@pytest.mark.parametrize("installed", ["onnxruntime", "onnxruntime-gpu"])
def test_either_installed_runtime_gives_the_version_of_both_images(
    installed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pretend(name: str) -> Any:
        if not name.startswith("onnxruntime"):
            return distribution(name)
        if name != installed:
            raise PackageNotFoundError(name)
        return SimpleNamespace(version="1.99.0", requires=[])

    monkeypatch.setattr(contents, "distribution", pretend)
    contents.lock_requirements.cache_clear()
    try:
        assert names_of("cpu", "serve")["onnxruntime"] == "1.99.0"
        assert names_of("gpu", "serve")["onnxruntime-gpu[cuda,cudnn]"] == "1.99.0"
    finally:
        contents.lock_requirements.cache_clear()


def test_extras_that_name_other_extras_are_expanded() -> None:
    names = names_of("cpu", "train")
    assert {"torch", "onnx", "uvloop", "onnxruntime", "safetensors"} <= set(names)
    assert "pipe-road" not in names
    assert "+" not in names["torch"]


def test_torch_for_cpu_is_excluded_on_gpus() -> None:
    public = names_of("cpu", "train")["torch"]
    requirement = Requirement(f"torch=={names_of('gpu', 'train')['torch']}")
    assert requirement.specifier.contains(public)
    assert requirement.specifier.contains(f"{public}+cu128")
    assert not requirement.specifier.contains(f"{public}+cpu")


@pytest.mark.parametrize("accelerator", contents.ACCELERATORS)
def test_the_service_has_no_packages_that_it_does_not_import(accelerator: str) -> None:
    names = {package.name for package in packages_from_pins(serving_requirements(accelerator))}
    assert {"numpy", "flatbuffers", "pydantic", "tokenizers", "uvloop", "httptools"} <= names
    assert not names & {
        "typer",
        "uvicorn",
        "click",
        "rich",
        "psutil",
        "huggingface-hub",
        "hf-xet",
        "tqdm",
        "httpx2",
        "kserve",
    }


def test_codec_requirements_are_installed_with_their_dependencies() -> None:
    names = {package.name for package in packages_from_pins(serving_requirements("cpu", ["transformers"]))}
    assert {"huggingface-hub", "tqdm"} <= names
