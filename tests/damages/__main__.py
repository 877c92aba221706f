"""Write docs/damages.md, the table of the damages: `python -m tests.damages`."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.contract.sources import SOURCE_ROOT
from tests.damages.damages import Damage, every_damage

_INTRODUCTION = """\
# Damages

Each damage below is made on purpose by `tests/damages`, and the check beside it must stop it. The same projects without
damage must never be stopped. `python -m tests.damages` writes this table; `make test-long` runs all of it, `make test`
a sample. [evaluation.md](evaluation.md) and [export.md](export.md) describe the checks.
"""


def document(damages: Sequence[Damage]) -> str:
    places: dict[str, dict[tuple[str, str], list[str]]] = {}
    for damage in damages:
        check = f"not stopped: {damage.not_stopped}" if damage.not_stopped else f"`{damage.stopped_by}`"
        places.setdefault(damage.place, {}).setdefault((damage.name, check), []).append(damage.kind)
    lines = [_INTRODUCTION, "| where | damage | kinds of models | stopped by |", "|---|---|---|---|"]
    for place, rows in places.items():
        lines += [f"| {place} | {name} | {', '.join(kinds)} | {check} |" for (name, check), kinds in rows.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    (SOURCE_ROOT / "docs" / "damages.md").write_text(document(every_damage()))
