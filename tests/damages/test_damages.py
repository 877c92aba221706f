"""Damaged data, models and files, each stopped by the check that is meant for it; undamaged ones never."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.damages.__main__ import document
from tests.damages.damages import LANGUAGE, Damage, copied, every_damage, ordered_days, own_persons
from tests.damages.harness import Project, Workplace, stopped, stopping_checks
from tests.damages.kinds import KINDS

DAMAGES = every_damage()
CODE = ("metrics", "codec")  # places where a damage is a text


def sample_of(damages: list[Damage]) -> set[str]:
    """Return the first damages of each place that different checks stop; the language model takes longest."""
    checks: dict[str, dict[str, str]] = {}
    for damage in damages:
        if damage.kind != LANGUAGE and not damage.not_stopped:
            checks.setdefault(damage.place, {}).setdefault(damage.stopped_by, damage.id)
    return {name for by_check in checks.values() for name in islice(by_check.values(), 2)}


QUICK = sample_of(DAMAGES)  # with the controls 25 cases; `make test-long` runs all


def cases() -> Iterator[Any]:
    for damage in DAMAGES:
        marks = [] if damage.id in QUICK else [pytest.mark.long]
        if damage.not_stopped:
            marks.append(pytest.mark.xfail(strict=True, reason=damage.not_stopped))
        yield pytest.param(damage, id=damage.id, marks=marks)


def controls() -> Iterator[Any]:
    """Yield for each place where a kind is damaged the same project without any damage."""
    quick = {(kind, "ONNX graph") for kind in KINDS if kind not in (LANGUAGE, "regressor 1e6")}
    for kind, place in dict.fromkeys((damage.kind, damage.place) for damage in DAMAGES):
        control = Damage(kind, "undamaged", place, "" if place in CODE else lambda _: None, "")
        yield pytest.param(control, id=control.id, marks=[] if (kind, place) in quick else pytest.mark.long)
    changes = {"time_column": ordered_days, "group_column": own_persons, "copies": copied}
    for damage in (damage for damage in DAMAGES if damage.prepare):
        control = replace(damage, name=f"not {damage.name}", apply=changes[next(iter(damage.prepare))])
        yield pytest.param(control, id=control.id, marks=pytest.mark.long)


def draws() -> Iterator[Any]:
    """Yield other data and other sizes for each kind."""
    for kind in KINDS:
        for seed in range(1, 6):
            for size in (1, 2):
                yield pytest.param(kind, seed, size, marks=pytest.mark.long)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    return Workplace(tmp_path_factory.mktemp("whole"))


@pytest.mark.parametrize("damage", [*cases()])
def test_damage_is_stopped_by_its_check(damage: Damage, workplace: Workplace, tmp_path: Path) -> None:
    assert damage.stopped_by in stopping_checks(damage, workplace, tmp_path)


@pytest.mark.parametrize("control", [*controls()])
def test_undamaged_project_is_not_stopped(control: Damage, workplace: Workplace, tmp_path: Path) -> None:
    assert stopping_checks(control, workplace, tmp_path) == set()


@pytest.mark.parametrize(("kind", "seed", "size"), [*draws()])
def test_other_data_are_not_stopped(kind: str, seed: int, size: int, tmp_path: Path) -> None:
    splits = KINDS[kind].splits(seed, size * KINDS[kind].samples)
    project = Project.make(KINDS[kind], tmp_path / "project", splits)
    for work in (project.prepare, project.train, project.evaluate):
        assert stopped(work, project) == set()


def test_every_kind_and_place_has_damages_and_controls() -> None:
    assert len(DAMAGES) >= 100
    assert len({damage.id for damage in DAMAGES}) == len(DAMAGES)
    assert {damage.kind for damage in DAMAGES} == set(KINDS)
    assert len([*controls(), *draws()]) >= 60


def test_document_lists_damages_that_are_not_stopped() -> None:
    damage = replace(DAMAGES[0], not_stopped="no check reads this")
    assert "no check reads this" in document([damage])
