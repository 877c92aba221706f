from __future__ import annotations

import re

import pytest

from k8s.names import JOB, JOBSET, LABEL, fitting

LABEL_FORM = re.compile(r"^[a-z]([-a-z0-9]*[a-z0-9])?$")


@pytest.mark.parametrize(
    ("text", "limit", "name"),
    [
        ("digits", LABEL, "digits"),
        ("a", LABEL, "a"),
        ("a" * 63, LABEL, "a" * 63),
        ("a" * 64, LABEL, f"{'a' * 54}-ffe054fe"),
        ("a" * 52, JOB, "a" * 52),
        ("a" * 53, JOB, f"{'a' * 43}-abe346a7"),
        ("a" * 45, JOBSET, "a" * 45),
        ("Digits", LABEL, "digits-"),
        ("my_model", LABEL, "my-model-"),
        ("my--model", LABEL, "my-model-"),
        ("7b", LABEL, "x-7b-"),
        ("-a-", LABEL, "a-"),
        ("größe", LABEL, "gr-e-"),
        ("…", LABEL, "x-"),
        ("", LABEL, "x-"),
    ],
)
def test_a_name_that_fits_stays_and_any_other_gets_a_hash(text: str, limit: int, name: str) -> None:
    made = fitting(text, limit)
    assert made == name or (name.endswith("-") and re.fullmatch(re.escape(name) + "[0-9a-f]{8}", made))


@pytest.mark.parametrize("limit", [LABEL, JOB, JOBSET])
@pytest.mark.parametrize("text", ["", "-", "9", "a" * 200, "A" * 200, "a-" * 40, "x" * 40 + "." * 30, "ü" * 70, "a/b"])
def test_whatever_comes_in_a_label_comes_out(text: str, limit: int) -> None:
    name = fitting(text, limit)
    assert LABEL_FORM.match(name)
    assert len(name) <= limit
    assert fitting(name, limit) == name


def test_two_names_never_become_one() -> None:
    texts = ["a_b", "a-b", "a.b", "A-b", "a--b", "a" * 64, "a" * 65, "", "-"]
    assert len({fitting(text) for text in texts}) == len(texts)
