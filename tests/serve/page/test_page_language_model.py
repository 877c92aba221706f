"""The page's form for a language model."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pipeline.contract.signature import Generation
from serve.page.page import text_form
from tests.serve.browser import PROGRAM, Browser
from tests.serve.llm import tiny

if TYPE_CHECKING:
    from tests.serve.conftest import Launcher


@pytest.mark.parametrize(
    ("template", "path"), [("", "/openai/v1/completions"), ("{{ messages }}", "/openai/v1/chat/completions")]
)
def test_form_sends_a_message_or_the_beginning_of_a_text(template: str, path: str) -> None:
    known = tiny.signature(template=template).generation
    assert isinstance(known, Generation)
    assert text_form(known) == {"kind": "text", "examples": [], "chat": bool(template), "path": path, "max_tokens": 48}


@pytest.mark.long
@pytest.mark.skipif(PROGRAM is None, reason="no Chromium is installed here")
@pytest.mark.parametrize("template", ["", tiny.TEMPLATE])
def test_typed_text_is_answered(start: Launcher, tmp_path: Path, template: str) -> None:
    server = start(tiny.build(tmp_path / "bundle", template=template, end=()))
    with contextlib.closing(Browser(tmp_path / "chromium")) as browser:
        browser.open(f"{server.url}/")
        browser.value("document.getElementById('body').value = 'hello'")
        browser.press(".buttons button", "Enter")
        assert browser.text("#answer pre.text")
        assert "ms round trip" in browser.text(".took")
        browser.value("document.getElementById('body').value = 'x'.repeat(5000)")
        browser.press(".buttons button", "Enter")
        assert "characters do not fit in the model's 96 positions" in browser.text("#answer .error")
        assert browser.complaints == []
