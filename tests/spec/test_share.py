from __future__ import annotations

import pytest

from pipeline.spec.config import parse_config
from pipeline.spec.errors import ConfigError
from pipeline.spec.share import share_of


@pytest.mark.parametrize(
    ("text", "share"), [("10%", 0.1), ("0.1", 0.1), (" 2.5 % ", 0.025), ("100%", 1.0), ("1", 1.0), ("0", 0.0)]
)
def test_a_share_is_a_part_of_one(text: str, share: float) -> None:
    assert share_of(text) == pytest.approx(share)


@pytest.mark.parametrize("text", ["", "10", "101%", "-1%", "1e-1", "nan", "a tenth", "٣%"])
def test_what_is_no_share_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is no share; write it as in 10% or 0\.1"):
        share_of(text)


@pytest.mark.parametrize(("given", "kept"), [("10%", "10%"), (0.25, "0.25"), ("", "")])
def test_a_canary_is_written_as_people_do(given: object, kept: str) -> None:
    config = parse_config({"name": "t", "task": "t.py:T", "codec": "c.py:C", "serve": {"canary": given}}, "x")
    assert config.serve.canary == kept


@pytest.mark.parametrize(("given", "sentence"), [("100%", "a canary gets less than all"), ("much", "is no share")])
def test_a_canary_that_is_none_is_refused(given: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        parse_config({"name": "t", "task": "t.py:T", "codec": "c.py:C", "serve": {"canary": given}}, "x")
