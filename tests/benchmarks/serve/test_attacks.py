from __future__ import annotations

import pytest

from benchmarks.serve import attacks


@pytest.mark.long
@pytest.mark.parametrize("name", ["V1 empty lists, gzip", "gRPC empty inputs, gzip"])
def test_an_attack_is_measured_beside_honest_requests(name: str) -> None:
    (row,) = attacks.measure(1.0, [name])
    assert "413" in row.answers or "status 8" in row.answers
    assert "failed" not in row.answers
    assert row.honest > 0
    assert 0 < row.p50_ms <= row.p99_ms
    assert name in attacks.text([row])


def test_attacks_have_their_size() -> None:
    for attack in attacks.attacks():
        compressed = any(value == "gzip" for _, value in attack.headers)
        assert not attack.body or len(attack.body) < 4_000_000 * compressed + 210_000
