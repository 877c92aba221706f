from __future__ import annotations

from concurrent.futures import Executor
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.spec.bundle import open_bundle
from pipeline.spec.errors import InvalidPayload
from serve.generate.engine import Engine
from serve.generate.request import conversation
from serve.generate.writer import Words, Writer
from tests.serve.generate import tiny

ASKED = conversation(b'{"model": "tiny", "messages": [{"role": "user", "content": "x"}]}')


@pytest.fixture
def writer(words: Words, tiny_path: Path, pool: Executor) -> Writer:
    """With memory for one text of 20 positions."""
    made = Writer(words, open_bundle(tiny_path), pool)
    rules = replace(made.engine.rules, cache_bytes=made.engine.room.bytes(1, 20))
    made.engine = Engine(words.graph, rules, pool)
    return made


def test_an_answer_that_may_be_as_long_as_there_is_room_fits_in_memory_too(writer: Writer) -> None:
    """Else whoever names no length were refused, always, by a model with more positions than the memory holds."""
    assert writer.order(ASKED, [[tiny.BEGIN] * 8]).most == 12


def test_a_prompt_that_leaves_no_memory_for_an_answer_is_refused(writer: Writer) -> None:
    with pytest.raises(InvalidPayload, match="may take 21 positions; the service has memory for 20"):
        writer.order(ASKED, [[tiny.BEGIN] * 20])
