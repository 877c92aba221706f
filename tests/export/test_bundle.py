from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from export import bundle
from export.bundle import check_requirements
from export.golden import check_decoded
from export.subject import ModelProperties
from pipeline.contract.config import Config
from pipeline.contract.settings.bundled import BUNDLED_SETTINGS
from pipeline.contract.signature import TensorSpec
from pipeline.system.errors import ConfigError
from tests.serve.special_models import slow

SPECS = (TensorSpec(name="x", datatype="FP32", shape=("batch", 4)),)


def refusal(arrays: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        check_decoded(arrays, SPECS, 2)
    return str(caught.value)


def test_arrays_that_the_model_takes_are_accepted() -> None:
    check_decoded({"x": np.zeros((2, 4), np.float32), "more": None}, SPECS, 2)


@pytest.mark.parametrize("kind", ["float64", "int64", "float16", "U3", "object"])
def test_array_of_another_type_is_refused_with_both_types(kind: str) -> None:
    text = refusal({"x": np.zeros((2, 4), kind)})
    assert np.dtype(kind).name in text or str(np.dtype(kind)) in text
    assert text.endswith("the model takes FP32")


@pytest.mark.parametrize("shape", [(), (4,), (2, 5), (3, 4), (2, 4, 1)])
def test_array_of_another_shape_is_refused_with_both_shapes(shape: tuple[int, ...]) -> None:
    assert f"of shape {list(shape)}, the model takes ['batch', 4]" in refusal({"x": np.zeros(shape, np.float32)})


@pytest.mark.parametrize("arrays", [{}, {"y": np.zeros((2, 4), np.float32)}, {"x": [[0.0] * 4] * 2}])
def test_input_without_an_array_is_named(arrays: Any) -> None:
    assert "gives no array `x`" in refusal(arrays)


@pytest.mark.parametrize("arrays", [None, np.zeros((2, 4), np.float32), [1]])
def test_codec_that_gives_no_mapping_is_refused(arrays: Any) -> None:
    assert "not a mapping of input names to arrays" in refusal(arrays)


def test_bundled_settings_of_the_service_are_in_the_signature(tmp_path: Path) -> None:
    words = {
        "provider": "cpu",
        "threads": 3,
        "max_batch_size": 5,
        "max_body_bytes": 7000,
        "batch_rows": 11,
        "max_waiting": 13,
        "deadline_seconds": 1.75,
        "max_cache_bytes": 17,
    }
    assert words.keys() == set(BUNDLED_SETTINGS)
    config = Config.model_validate({"name": "tiny", "task": "task.py:T", "codec": "codec.py:C", "serve": words})
    signature = bundle._signature(
        slow(tmp_path / "bundle"), config, ModelProperties({"sequence": 9}, {"sequence": 2}), "Codec", (), ()
    )
    assert signature.limits.model_dump() | signature.runtime.model_dump() == {
        **words,
        "axes": {"sequence": 9},
        "shortest": {"sequence": 2},
        "batch_delay_ms": 0,
    }


def test_outputs_with_a_value_for_each_class_get_the_names_of_the_classes() -> None:
    shapes: dict[str, tuple[int | str, ...]] = {
        "logits": ("batch", 2),
        "other": ("batch", 3),
        "tags": ("batch", "length", 2),
        "pair": ("batch",),
    }
    outputs = tuple(TensorSpec(name=name, datatype="FP32", shape=shape) for name, shape in shapes.items())
    found = bundle._labelled(outputs, ("no", 1))
    assert {spec.name: spec.labels for spec in found if spec.labels} == {"logits": ("no", "1")}
    assert bundle._labelled(outputs, ()) == outputs


REFERENCE = "some_codec.py:Codec"


def write(root: Path, *imports: str) -> Path:
    (root / "some_codec.py").write_text("\n".join(imports) + "\n\n\nclass Codec: ...\n")
    return root


def test_declared_packages_are_pinned_as_installed_here(tmp_path: Path) -> None:
    root = write(
        tmp_path, "import json", "import numpy", "import yaml", "from pipeline.contract.signature import Drawing"
    )
    assert check_requirements(REFERENCE, root, ("PyYAML>=6",)) == (f"pyyaml=={metadata.version('pyyaml')}",)
    assert check_requirements(REFERENCE, write(tmp_path, "import numpy"), ()) == ()


@pytest.mark.parametrize(
    ("imported", "declared", "sentence"),
    [
        ("yaml", (), r'imports yaml, which the service does not install; declare it .* requires = \("pyyaml",\)'),
        ("no_such_thing", (), "imports no_such_thing, which the service does not install"),
        ("numpy", ("no-such-thing",), "needs no-such-thing, which is not installed here"),
        ("yaml", ("pyyaml<1",), "needs pyyaml<1, but .* is installed here"),
        ("numpy", ("torch",), "`requires` has torch, which is too large for a service"),
        ("numpy", ("not a name",), "`requires` has 'not a name'; write a package's name"),
    ],
)
def test_imports_the_service_cannot_make_are_refused(
    tmp_path: Path, imported: str, declared: tuple[str, ...], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        check_requirements(REFERENCE, write(tmp_path, f"import {imported}"), declared)
