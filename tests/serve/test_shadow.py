from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.contract.bundle import Bundle, open_bundle
from pipeline.contract.signature import Signature, TensorSpec
from pipeline.system.errors import BundleError
from serve.runtime.loading import load_predictor
from serve.runtime.predictor import Predictor
from serve.runtime.session import Session
from serve.shadow import MAX_WAITING_COPIES, Agreement, Shadow, count_differences, incompatibility, open_shadow
from tests.serve.load_clients import wait_until

Array = np.ndarray[Any, Any]
SECONDS = 20


class Watched(Predictor):
    """A predictor that reports when it runs, waits while its gate is closed, and may fail."""

    def __init__(self, bundle: Bundle) -> None:
        super().__init__(bundle, Session(bundle, "cpu", 1))
        self.gate, self.entered = threading.Event(), threading.Event()
        self.gate.set()
        self.fails = False

    def run(self, arrays: Mapping[str, Array], outputs: Sequence[str] | None = None) -> dict[str, Array]:
        self.entered.set()
        assert self.gate.wait(SECONDS)
        if self.fails:
            raise RuntimeError("no room")
        return super().run(arrays, outputs)


@pytest.fixture
def candidate(other_path: Path) -> Watched:
    return Watched(open_bundle(other_path))


@pytest.fixture
def shadow(candidate: Watched, other_path: Path) -> Iterator[Shadow]:
    with closing(Shadow("tiny", other_path, candidate, 1.0)) as shadow:
        yield shadow
        candidate.gate.set()


@pytest.fixture(scope="module")
def sent(bundle: Bundle) -> tuple[dict[str, Array], dict[str, Array]]:
    """Inputs and outputs of the current version."""
    images = {"image": np.random.default_rng(2).random((4, 1, 8, 8)).astype(np.float32)}
    return images, load_predictor(bundle, "cpu", 1).run(images)


def test_identical_candidate_agrees(bundle: Bundle, bundle_path: Path, sent: Any) -> None:
    with closing(open_shadow("tiny", bundle_path, bundle.signature, 1.0)) as shadow:
        shadow.offer(*sent)
        wait_until(lambda: shadow.agreement.same == 1)
    assert shadow.agreement == Agreement(same=1, rows=4, rows_same_class=4, max_difference=0.0)
    assert shadow.status()["bundle"] == bundle.digest


def test_differing_candidate_is_measured(shadow: Shadow, candidate: Watched, sent: Any) -> None:
    shadow.offer(*sent)
    wait_until(lambda: shadow.agreement.other == 1)
    images, outputs = sent
    apart = np.abs(candidate.run(images)["logits"].astype(np.float64) - outputs["logits"])
    assert shadow.agreement.max_difference == pytest.approx(float(apart.max()))
    assert (shadow.agreement.same, shadow.agreement.rows) == (0, 4)
    assert shadow.agreement.rows_same_class < 4


def test_requests_beyond_the_queue_of_a_busy_shadow_are_dropped(shadow: Shadow, candidate: Watched, sent: Any) -> None:
    candidate.gate.clear()
    shadow.offer(*sent)
    assert candidate.entered.wait(SECONDS)
    for _ in range(MAX_WAITING_COPIES + 5):
        shadow.offer(*sent)
    assert shadow.agreement.dropped == 5
    candidate.gate.set()
    wait_until(lambda: shadow.agreement.other == MAX_WAITING_COPIES + 1)


def test_failing_candidate_is_counted_and_logged_once(
    shadow: Shadow, candidate: Watched, sent: Any, caplog: pytest.LogCaptureFixture
) -> None:
    candidate.fails = True
    shadow.offer(*sent)
    shadow.offer(*sent)
    wait_until(lambda: shadow.agreement.failed == 2)
    assert caplog.text.count("shadow failed (logged once, then counted): no room") == 1
    candidate.fails = False
    shadow.offer(*sent)
    wait_until(lambda: shadow.agreement.other == 1)


def test_only_the_configured_share_is_copied(candidate: Watched, other_path: Path, sent: Any) -> None:
    with closing(Shadow("tiny", other_path, candidate, 0.0)) as shadow:
        for _ in range(100):
            shadow.offer(*sent)
        assert shadow.agreement.dropped == 0
    assert not candidate.entered.is_set()


def test_closed_shadow_ends_its_thread_even_if_its_queue_was_full(
    shadow: Shadow, candidate: Watched, sent: Any
) -> None:
    candidate.gate.clear()
    for _ in range(MAX_WAITING_COPIES + 2):
        shadow.offer(*sent)
    shadow.close()
    candidate.gate.set()
    shadow._thread.join(SECONDS)
    assert not shadow._thread.is_alive()
    before = shadow.agreement.dropped
    shadow.offer(*sent)
    assert shadow.agreement.dropped == before


def test_integers_must_be_equal_and_other_shapes_differ() -> None:
    agreement, one = Agreement(), np.array([[1, 2]])
    count_differences(agreement, {"y": one}, {"y": one}, 1.0, 1.0)
    count_differences(agreement, {"y": one}, {"y": one + 1}, 1.0, 1.0)
    count_differences(agreement, {"y": one}, {"y": one[0]}, 1.0, 1.0)
    assert (agreement.same, agreement.other, agreement.max_difference) == (1, 2, 0.0)


def test_one_differing_output_makes_the_answer_differ() -> None:
    one = np.array([[1.0, 2.0]])
    for candidate in ({"y": one + 1, "z": one}, {"y": one, "z": one + 1}):
        count_differences(agreement := Agreement(), {"y": one, "z": one}, candidate, 0.0, 0.0)
        assert (agreement.same, agreement.other, agreement.max_difference) == (0, 1, 1.0)


def test_equal_infinities_and_empty_outputs_agree() -> None:
    agreement = Agreement()
    for array in (np.array([[np.inf, np.nan]]), np.zeros((0, 2)), np.array(3.0)):
        count_differences(agreement, {"y": array}, {"y": array}, 0.0, 0.0)
    assert (agreement.same, agreement.max_difference) == (3, 0.0)


def test_candidate_with_another_signature_is_refused(bundle: Bundle, bundle_path: Path) -> None:
    mine = bundle.signature
    wider = TensorSpec(name="image", datatype="FP32", shape=("batch", 1, 9, 9))
    with pytest.raises(BundleError, match=r"it cannot shadow tiny: its inputs are image FP32 .*1, 8, 8.*, the current"):
        open_shadow("tiny", bundle_path, mine.model_copy(update={"inputs": (wider,)}), 1.0)
    missing: Signature = mine.model_copy(
        update={"inputs": (mine.inputs[0].model_copy(update={"allows_missing": True}),)}
    )
    assert incompatibility(missing, mine).startswith("it was trained without missing numbers in image, which")
    assert incompatibility(mine, missing) == ""
    poorer: Signature = mine.model_copy(update={"outputs": ()})
    assert incompatibility(mine, poorer) == "it has no output logits"
    assert incompatibility(poorer, mine) == ""
