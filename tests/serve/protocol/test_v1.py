from __future__ import annotations

import pytest

from pipeline.system.errors import InvalidPayload
from serve.protocol.v1 import parse


@pytest.mark.parametrize("name", [b"null", b'"serving_default"'])
def test_signature_name_of_tensorflow_serving_is_accepted(name: bytes) -> None:
    assert parse(b'{"signature_name": %b, "instances": [1]}' % name) == [1]


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (b'{"instances": [1], "signature_name": "other"}', "body: signature_name 'other' is unknown"),
        (b'{"instances": [1], "instances": [2]}', 'an object has the name "instances" twice'),
        (b'{"instances": [{"x": 1, "x": 2}]}', 'an object has the name "x" twice'),
        (b'{"inputs": {"x": [1]}}', '"instances" is missing; "inputs", a list for each column, is not supported: send'),
        (b'{"instances": [1], "signature_name": 1}', "signature_name '1' is unknown; the only one is"),
    ],
)
def test_another_form_is_refused(body: bytes, sentence: str) -> None:
    with pytest.raises(InvalidPayload, match=sentence):
        parse(body)
