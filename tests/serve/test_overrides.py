"""What whoever runs a service says otherwise than the bundle."""

from __future__ import annotations

from concurrent.futures import Executor

import pytest

from pipeline.spec.bundle import Bundle
from pipeline.spec.errors import InvalidPayload
from pipeline.spec.limits import SEALED
from serve.loading import prove
from serve.options import parse
from serve.overrides import Overrides
from serve.runtime.batcher import Rules
from serve.served import Served

MORE = ["--max-body-bytes", "5000", "--deadline-seconds", "0.5", "--max-cache-bytes", "9000"]
SAID = ["--max-batch-size", "2", "--max-waiting", "7", "--batch-rows", "4", "--batch-delay-ms", "1.5"]


def test_every_word_that_travels_in_a_bundle_can_be_said_at_the_start() -> None:
    elsewhere = {"provider", "threads"}  # options of their own
    assert {*Overrides.__dataclass_fields__} == {*SEALED} - elsewhere


def test_what_is_said_holds_and_what_is_not_is_the_bundles(bundle: Bundle, pool: Executor) -> None:
    found = parse(
        ["b", *SAID, "--max-body-bytes", "5000", "--deadline-seconds", "0.5", "--max-cache-bytes", "9000"]
    ).overrides.of(bundle)
    assert found.signature.limits.model_dump() == {
        "max_batch_size": 2,
        "max_body_bytes": 5000,
        "max_waiting": 7,
        "deadline_seconds": 0.5,
        "max_cache_bytes": 9000,
        "axes": {},
    }
    assert found.signature.runtime.threads == bundle.signature.runtime.threads
    assert found.digest == bundle.digest
    served = Served("tiny", "1", prove(found, "cpu", 1), pool)
    assert served.batcher.rules == Rules(mergeable=True, rows=4, waiting=7, delay_seconds=0.0015, computes=True)
    assert served.max_body_bytes == 5000
    assert served._deadline_seconds == 0.5
    with pytest.raises(InvalidPayload, match="limit of 2"):
        served.predictor.decode(bundle.golden().instances * 3)


def test_where_nothing_is_said_the_bundle_is_as_it_was(bundle: Bundle) -> None:
    assert parse(["b"]).overrides.of(bundle) is bundle
