"""`python -m tests.damages`: print the table of the damages."""

from __future__ import annotations

from collections.abc import Sequence

from tests.damages.damages import Damage, every_damage

_INTRODUCTION = """\
Each damage below is made on purpose by `tests/damages`, and the check beside it must stop it. The same projects without
damage must never be stopped. `make test-long` runs all of them, `make test` a sample.
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
    print(document(every_damage()), end="")
