from __future__ import annotations

import pytest

from pipeline.system.errors import InvalidPayload
from serve.protocol.v1 import parse


def test_instances_are_parsed() -> None:
    assert parse(b'{"instances": [1, 2]}') == [1, 2]


@pytest.mark.parametrize("name", [b"null", b'"serving_default"'])
def test_signature_name_of_tensorflow_serving_is_accepted(name: bytes) -> None:
    assert parse(b'{"signature_name": %b, "instances": [1]}' % name) == [1]


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (b"", "body: not valid JSON"),
        (b"[1]", "body: must be a JSON object"),
        (b"{}", 'body: the field "instances" is missing'),
        (b'{"instances": [1], "signature": 1}', 'body: unknown field "signature"'),
        (b'{"instances": [1], "signature_name": "other"}', "body: signature_name 'other' is unknown"),
        (b'{"instances": [1], "signature_name": 1}', "signature_name '1' is unknown; the only one is"),
        (b"[" * 100_000, "body: lists and objects are nested .* 64 levels deep"),
    ],
)
def test_invalid_body_is_rejected(body: bytes, sentence: str) -> None:
    with pytest.raises(InvalidPayload, match=sentence):
        parse(body)
