from __future__ import annotations

import pytest

from pipeline.spec.address import split_address
from pipeline.spec.errors import ConfigError


def test_an_address_is_a_host_and_a_port() -> None:
    assert split_address("head:29500") == ("head", 29500)
    assert split_address("[::1]:29500") == ("::1", 29500)


@pytest.mark.parametrize("address", ["", "head", "head:", ":29500", "head:x"])
def test_anything_else_is_a_mistake(address: str) -> None:
    with pytest.raises(ConfigError, match="write it as host:port"):
        split_address(address)
