from __future__ import annotations

import pytest

from serve.wire.request import request_id


@pytest.mark.parametrize("given", [b"7", b"0af7651916cd43dd8448eb211c80319c", b"order/12:a.b_c+d=", b"a" * 128])
def test_valid_request_id_is_kept(given: bytes) -> None:
    assert request_id(given) == given


@pytest.mark.parametrize("given", [None, b"", b"-x", b"a b", b"a\r\nset-cookie: x", b'a"', "é".encode(), b"a" * 129])
def test_invalid_request_id_is_replaced(given: bytes | None) -> None:
    made = request_id(given)
    assert made != given
    assert request_id(made) == made


def test_generated_request_ids_are_unique() -> None:
    assert len({request_id(None) for _ in range(1000)}) == 1000
