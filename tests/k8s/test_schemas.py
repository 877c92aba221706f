"""The checks above are only worth something when they can fail."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest

from k8s.manifest import load

from .schemas import validate


@pytest.mark.parametrize(
    ("folder", "kind", "path"),
    [
        ("serve", "Deployment", ("spec", "template", "spec")),
        ("kserve", "InferenceService", ("spec", "predictor")),
        ("train", "Job", ("spec", "template", "spec")),
    ],
)
def test_a_misspelt_field_is_noticed(folder: str, kind: str, path: tuple[str, ...]) -> None:
    item = load(folder)[kind]
    place: dict[str, Any] = item
    for name in path:
        place = place[name]
    place["serviceAcountName"] = "typo"
    with pytest.raises(jsonschema.ValidationError, match="serviceAcountName"):
        validate(item)
