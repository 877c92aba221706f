"""HPACK of libnghttp2, where this library is installed: it comes with curl."""

from __future__ import annotations

import ctypes
import ctypes.util
import functools
from collections.abc import Sequence
from typing import Any

from serve.wire.http2.hpack import Field

_NO_INDEX = 1  # flags of a field: encode as never indexed
_FINAL, _EMIT = 1, 2  # flags that inflating returns
_UNLIMITED = 1 << 20


class _Field(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("value", ctypes.c_char_p),
        ("name_bytes", ctypes.c_size_t),
        ("value_bytes", ctypes.c_size_t),
        ("flags", ctypes.c_uint8),
    )


class _InflatedField(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_void_p),
        ("value", ctypes.c_void_p),
        ("name_bytes", ctypes.c_size_t),
        ("value_bytes", ctypes.c_size_t),
        ("flags", ctypes.c_uint8),
    )


@functools.cache
def load_library() -> Any:
    """Return the library, or None."""
    if (name := ctypes.util.find_library("nghttp2")) is None:
        return None
    library = ctypes.CDLL(name)
    library.nghttp2_hd_deflate_hd.restype = library.nghttp2_hd_inflate_hd2.restype = ctypes.c_ssize_t
    return library


class Encoder:
    def __init__(self, library: Any) -> None:
        self._library, self._state = library, ctypes.c_void_p()
        assert library.nghttp2_hd_deflate_new(ctypes.byref(self._state), ctypes.c_size_t(4096)) == 0

    def __del__(self) -> None:
        self._library.nghttp2_hd_deflate_del(self._state)

    def resize(self, size: int) -> None:
        assert self._library.nghttp2_hd_deflate_change_table_size(self._state, ctypes.c_size_t(size)) == 0

    def encode(self, fields: Sequence[Field], never_indexed: frozenset[bytes] = frozenset()) -> bytes:
        array = (_Field * len(fields))()
        for place, (name, value) in enumerate(fields):
            array[place] = _Field(name, value, len(name), len(value), _NO_INDEX if name in never_indexed else 0)
        buffer = ctypes.create_string_buffer(_UNLIMITED)
        arguments = buffer, ctypes.c_size_t(_UNLIMITED), array, ctypes.c_size_t(len(fields))
        size = self._library.nghttp2_hd_deflate_hd(self._state, *arguments)
        assert size >= 0
        return buffer.raw[:size]


class Decoder:
    def __init__(self, library: Any) -> None:
        self._library, self._state = library, ctypes.c_void_p()
        assert library.nghttp2_hd_inflate_new(ctypes.byref(self._state)) == 0

    def __del__(self) -> None:
        self._library.nghttp2_hd_inflate_del(self._state)

    def decode(self, block: bytes) -> list[Field] | None:
        """Return the fields; None for a malformed block."""
        fields: list[Field] = []
        field, flags = _InflatedField(), ctypes.c_int(0)
        while not flags.value & _FINAL:
            arguments = ctypes.byref(field), ctypes.byref(flags), block, ctypes.c_size_t(len(block)), ctypes.c_int(1)
            used = self._library.nghttp2_hd_inflate_hd2(self._state, *arguments)
            if used < 0:
                return None
            block = block[used:]
            if flags.value & _EMIT:
                name = ctypes.string_at(field.name, field.name_bytes)
                fields.append((name, ctypes.string_at(field.value, field.value_bytes)))
        self._library.nghttp2_hd_inflate_end_headers(self._state)
        return fields
