from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from pipeline.system.errors import BundleError
from train.batch_order import BatchOrder
from train.ledger import LedgerLine, batch_digest, read_lines, verify_ledger

ORDER = BatchOrder(samples=37, batch_size=8, seed=3)  # 5 steps an epoch
STEPS = 20


def line(step: int, order: BatchOrder = ORDER, attempt: int = 1, processes: int = 2) -> LedgerLine:
    ids = order.batch(step - 1)
    return LedgerLine(
        step=step,
        epoch=order.epoch_of(step - 1),
        samples=len(ids),
        digest=batch_digest(ids),
        processes=processes,
        attempt=attempt,
    )


def lines(steps: int = STEPS) -> list[LedgerLine]:
    return [line(step) for step in range(1, steps + 1)]


@pytest.mark.parametrize(("samples", "batch_size"), [(37, 8), (8, 8), (5, 100), (64, 1), (1, 1), (1437, 64)])
def test_lines_of_an_undisturbed_training_are_valid(samples: int, batch_size: int) -> None:
    order = BatchOrder(samples, batch_size, seed=1)
    steps = 3 * order.steps_per_epoch
    proof = verify_ledger([line(step, order) for step in range(1, steps + 1)], order, steps)
    assert (proof.fault, proof.lost, proof.repeated) == ("", 0, 0)
    assert (proof.steps, proof.epochs, proof.samples) == (steps, 3, samples)


def test_attempts_and_numbers_of_processes_are_reported() -> None:
    received = [line(1), line(2, processes=1), line(3, attempt=2, processes=4), *lines(5)[3:]]
    received[3:] = [one.model_copy(update={"attempt": 4}) for one in received[3:]]
    proof = verify_ledger(received, ORDER, 5)
    assert (proof.fault, proof.attempts, proof.processes) == ("", 3, (1, 4))


def test_unfinished_training_is_verified_up_to_its_last_step() -> None:
    proof = verify_ledger(lines(7), ORDER, 7)
    assert (proof.fault, proof.lost, proof.repeated, proof.epochs) == ("", 0, 0, 1.4)
    assert verify_ledger([], ORDER, 0).fault == ""


@pytest.mark.parametrize("step", [1, 4, 5, 6, 19])
def test_a_missing_line_is_named_and_its_samples_are_lost(step: int) -> None:
    proof = verify_ledger([one for one in lines() if one.step != step], ORDER, STEPS)
    assert proof.fault == f"line {step}: the line of step {step} is missing, this one is of step {step + 1}"
    assert (proof.lost, proof.repeated) == (ORDER.size(step - 1), 0)


def test_missing_last_lines_are_named() -> None:
    proof = verify_ledger(lines(18), ORDER, STEPS)
    assert proof.fault == "the line of step 19 is missing, 20 steps were trained"
    assert proof.lost == ORDER.size(18) + ORDER.size(19)


@pytest.mark.parametrize("step", [1, 5, 12, 20])
def test_a_doubled_line_is_named_and_its_samples_are_repeated(step: int) -> None:
    received = lines()
    received.insert(step, received[step - 1])
    proof = verify_ledger(received, ORDER, STEPS)
    assert proof.fault == f"line {step + 1}: a second line of step {step}"
    assert (proof.lost, proof.repeated) == (0, ORDER.size(step - 1))


def test_lines_out_of_order_are_reported() -> None:
    received = lines()
    received[7], received[11] = received[11], received[7]
    proof = verify_ledger(received, ORDER, STEPS)
    assert proof.fault == "line 8: out of order, it is of step 12"
    assert (proof.lost, proof.repeated) == (0, 0)


def test_swapped_samples_of_steps_are_reported() -> None:
    """In one epoch every sample was still used once; between two epochs samples are lost and repeated."""
    for left, right, moved in ((6, 8, 0), (3, 17, None)):
        received = lines()
        digests = received[left].digest, received[right].digest
        for place, digest in ((left, digests[1]), (right, digests[0])):
            received[place] = received[place].model_copy(update={"digest": digest})
        proof = verify_ledger(received, ORDER, STEPS)
        assert proof.fault == f"line {left + 1}: step {left + 1} was trained on the samples of step {right + 1}"
        if moved is not None:
            assert (proof.lost, proof.repeated) == (moved, moved)
        else:
            assert proof.lost > 0
            assert proof.repeated > 0


def test_unknown_samples_are_reported_and_planned_ones_are_lost() -> None:
    received = lines()
    forged = ORDER.batch(8).copy()
    forged[[0, 1]] = forged[[1, 0]]
    received[8] = received[8].model_copy(update={"digest": batch_digest(forged)})
    proof = verify_ledger(received, ORDER, STEPS)
    assert proof.fault == "line 9: step 9 was trained on samples that no step has"
    assert (proof.lost, proof.repeated) == (ORDER.size(8), 0)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"samples": 9}, "step 9 has 7 samples, not 9"),
        ({"epoch": 0}, "step 9 belongs to epoch 1, not 0"),
        ({"attempt": 2}, "attempt 1 after attempt 2"),
    ],
)
def test_altered_field_of_a_line_is_named(change: dict[str, int], sentence: str) -> None:
    received = lines()
    received[8] = received[8].model_copy(update=change)
    place = 10 if "attempt" in change else 9
    assert verify_ledger(received, ORDER, STEPS).fault == f"line {place}: {sentence}"


def test_a_line_beyond_the_last_step_is_reported() -> None:
    proof = verify_ledger(lines(21), ORDER, STEPS)
    assert proof.fault == "line 21: step 21 is beyond the last one, 20"
    assert (proof.lost, proof.repeated) == (0, ORDER.size(20))


def test_lines_of_another_seed_are_invalid() -> None:
    other = BatchOrder(ORDER.samples, ORDER.batch_size, seed=4)
    proof = verify_ledger([line(step, other) for step in range(1, STEPS + 1)], ORDER, STEPS)
    assert proof.fault == "line 1: step 1 was trained on samples that no step has"
    assert proof.lost == 4 * ORDER.samples


def test_any_damage_is_noticed_and_counted() -> None:
    """Lines are dropped and doubled at random; the counts are compared with a plain list."""
    draw = random.Random(7)
    for _ in range(100):
        copies = [draw.choice([0, 1, 1, 1, 2]) for _ in range(STEPS)]
        proof = verify_ledger(
            [one for one, count in zip(lines(), copies, strict=True) for _ in range(count)], ORDER, STEPS
        )
        lost = sum(ORDER.size(step) for step, count in enumerate(copies) if count == 0)
        repeated = sum(ORDER.size(step) for step, count in enumerate(copies) if count == 2)
        assert (proof.lost, proof.repeated) == (lost, repeated)
        assert bool(proof.fault) == (set(copies) != {1})


def test_digest_uses_eight_little_endian_bytes_per_sample() -> None:
    ids = np.array([1, 258])
    found = batch_digest(ids)
    assert found == "d4b6538234c2adfd24929c81adbc1bbced94c961ef3e778b83c8a0e558fb6198"
    assert found != batch_digest(ids[::-1].copy())
    assert found == batch_digest(ids.astype(">i8"))


def write(path: Path, received: list[LedgerLine], end: str = "") -> Path:
    path.write_text("".join(f"{one.model_dump_json()}\n" for one in received) + end)
    return path


def test_half_a_line_is_allowed_only_while_training(tmp_path: Path) -> None:
    path = write(tmp_path / "ledger.jsonl", lines(3), end='{"step": 4, "epo')
    assert read_lines(path, growing=True) == lines(3)
    with pytest.raises(BundleError, match=r"ledger.jsonl, line 4: damaged: "):
        read_lines(path)


@pytest.mark.parametrize("row", ["", "[]", "{}", '{"step": 0}', "\x00"])
def test_malformed_line_is_named(tmp_path: Path, row: str) -> None:
    path = write(tmp_path / "ledger.jsonl", lines(2), end=f"{row}\n")
    with pytest.raises(BundleError, match="line 3: damaged: "):
        read_lines(path, growing=True)


def test_missing_ledger_is_reported(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="without it, the samples used are unknown"):
        read_lines(tmp_path / "ledger.jsonl")
