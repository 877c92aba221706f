from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from pipeline.spec.codec import load_codec
from pipeline.spec.errors import ConfigError
from pipeline.spec.page import Drawing, drawing_of


class Drawn:
    page = Drawing(width=8, height=4, top=1)


class Plain:
    pass


def test_a_codec_has_a_drawing_or_none() -> None:
    assert drawing_of(Drawn(), "codec.py:Drawn") == Drawing(width=8, height=4, top=1, fit=False)
    assert drawing_of(Plain(), "codec.py:Plain") is None


@pytest.mark.parametrize("wrong", [{"width": 0}, {"height": 1000}, {"top": 0}, {"top": float("inf")}, {"pen": -1}])
def test_a_drawing_nobody_could_draw_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Drawing(**{"width": 8, "height": 8, "top": 16, **wrong})


def test_a_page_that_is_something_else_is_told_when_the_codec_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "pagecodec.py").write_text(
        "class C:\n page = {}\n def decode(self, x): ...\n def encode(self, x): ...\n"
    )
    with pytest.raises(ConfigError, match=r"pagecodec\.py:C: page must be a pipeline\.spec\.page\.Drawing, found dict"):
        load_codec("pagecodec.py:C", tmp_path)
