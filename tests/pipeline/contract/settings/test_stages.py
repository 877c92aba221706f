from __future__ import annotations

from typing import Any

import pytest

from pipeline.contract.config import parse_config
from pipeline.contract.settings.stages import Export
from pipeline.system.errors import ConfigError


def parsed(**export: Any) -> Export:
    return parse_config({"name": "a", "task": "a.py:A", "codec": "b.py:B", "export": export}, "pipe.yaml").export


def test_fp32_is_always_built_first() -> None:
    assert parsed(variants=["int8-static", "fp32"]).built_variants == ("fp32", "int8-static")
    assert parsed(variants=["fp16"]).built_variants == ("fp32", "fp16")
    assert parsed().built_variants == ("fp32",)


@pytest.mark.parametrize(
    ("export", "message"),
    [
        ({"choose": "int8-static"}, r"choose=int8-static is not made: add it to variants=\['fp32'\]"),
        ({"variants": ["fp16", "fp16"]}, "a variant is named twice"),
        ({"variants": ["int3"]}, "export.variants.0"),
        ({"choose": "fastest"}, "'fastest-that-passes'"),
        ({"variant_margin": -1}, "export.variant_margin"),
        ({"budget": {"p95_ms": 3}}, "'p50_ms', 'p99_ms', 'megabytes' or 'perplexity'"),
        ({"budget": {"megabytes": 0}}, "greater than 0"),
    ],
)
def test_invalid_export_settings_are_refused(export: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parsed(**export)
