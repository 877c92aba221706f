from __future__ import annotations

from k8s.context import fill_arguments


def test_only_defaults_of_arguments_are_replaced() -> None:
    text = "ARG BASE=a\nFROM ${BASE}\nARG BASE=a\nARG OTHER=b\nARG BASELINE=c\nARG BASE\n"
    assert fill_arguments(text, {"BASE": "z:1"}) == (
        "ARG BASE=z:1\nFROM ${BASE}\nARG BASE=z:1\nARG OTHER=b\nARG BASELINE=c\nARG BASE\n"
    )
