from __future__ import annotations

from pipeline.cli.project import reference
from pipeline.contract.config import Config
from pipeline.contract.settings.section import Section


def test_every_key_has_a_line_with_a_meaning() -> None:
    lines = reference().splitlines()
    for section, field in Config.model_fields.items():
        kind = field.annotation
        known = kind.model_fields if isinstance(kind, type) and issubclass(kind, Section) else {section: field}
        for name, inner in known.items():
            assert any(line.startswith(f"| `{name}` |") and line.endswith(f"| {inner.description} |") for line in lines)


def test_types_and_defaults_are_written_as_in_yaml() -> None:
    text = reference()
    assert "| `precision` | `auto` \\| `fp32` \\| `bf16` \\| `fp16` | `auto` |" in text
    assert "| `deterministic` | bool | `true` |" in text
    assert "| `batch_sizes` | list | `[1, 2, 7, 256]` |" in text
    assert '| `rendezvous` | str | `""` |' in text
    assert "| `name` | str | required |" in text
