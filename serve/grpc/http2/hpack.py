"""Header compression of HTTP/2 (RFC 7541): what clients send, decoded; what we answer, as plain literals.

The Huffman code of HPACK (RFC 7541, appendix B): texts of headers, decoded a byte at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

Field = tuple[bytes, bytes]

TABLE_BYTES = 4096  # of a client's dynamic table, as the standard begins with
_ENTRY_BYTES = 32  # that an entry counts for beside its texts
_MOST_NUMBER = 1 << 24  # no index, length or size is near it
_NO_VALUE = (
    "accept-charset accept-encoding accept-language accept-ranges accept access-control-allow-origin age allow "
    "authorization cache-control content-disposition content-encoding content-language content-length content-location "
    "content-range content-type cookie date etag expect expires from host if-match if-modified-since if-none-match "
    "if-range if-unmodified-since last-modified link location max-forwards proxy-authenticate proxy-authorization "
    "range referer refresh retry-after server set-cookie strict-transport-security transfer-encoding user-agent vary "
    "via www-authenticate"
)
STATIC: tuple[Field, ...] = (
    (b":authority", b""),
    (b":method", b"GET"),
    (b":method", b"POST"),
    (b":path", b"/"),
    (b":path", b"/index.html"),
    (b":scheme", b"http"),
    (b":scheme", b"https"),
    *((b":status", status) for status in (b"200", b"204", b"206", b"304", b"400", b"404", b"500")),
    *((name.encode(), b"gzip, deflate" if name == "accept-encoding" else b"") for name in _NO_VALUE.split()),
)
_STATUS = {value: bytes([0x80 | index]) for index, (name, value) in enumerate(STATIC, 1) if name == b":status"}
_STATUS_NAME = 8  # the first index of it


class HpackError(Exception):
    """The block cannot be decoded, and nothing that follows it on its connection can."""


class Decoder:
    """Of one connection. `changes` counts those of its table: between two, the same bytes mean the same."""

    def __init__(self, most_list_bytes: int) -> None:
        self._most_list_bytes = most_list_bytes
        self._table: deque[Field] = deque()  # newest first
        self._table_bytes = 0
        self._most_table_bytes = TABLE_BYTES
        self.changes = 0

    def decode(self, block: bytes) -> list[Field] | None:
        """The fields; None where they are more than may be, which harms the table no more than others do."""
        fields: list[Field] = []
        size = position = 0
        while position < len(block):
            byte = block[position]
            if byte & 0xE0 == 0x20:
                if fields or size:
                    raise HpackError("a table is resized behind a field")
                position = self._resize(block, position)
                continue
            if byte & 0x80:
                index, position = number(block, position, 7)
                field = self._field(index)
            else:
                field, position = self._literal(block, position, 6 if byte & 0x40 else 4)
                if byte & 0x40:
                    self._add(field)
            size += len(field[0]) + len(field[1]) + _ENTRY_BYTES
            if size <= self._most_list_bytes:
                fields.append(field)
        return fields if size <= self._most_list_bytes else None

    def _literal(self, block: bytes, position: int, bits: int) -> tuple[Field, int]:
        index, position = number(block, position, bits)
        if index:
            name = self._field(index)[0]
        else:
            name, position = text(block, position)
        value, position = text(block, position)
        return (name, value), position

    def _field(self, index: int) -> Field:
        if 0 < index <= len(STATIC):
            return STATIC[index - 1]
        place = index - len(STATIC) - 1
        if not 0 <= place < len(self._table):
            raise HpackError(f"no field has the index {index}")
        return self._table[place]

    def _add(self, field: Field) -> None:
        self.changes += 1
        self._table.appendleft(field)
        self._table_bytes += _cost(field)
        self._shrink()

    def _resize(self, block: bytes, position: int) -> int:
        size, position = number(block, position, 5)
        if size > TABLE_BYTES:
            raise HpackError(f"a table of {size} bytes, where {TABLE_BYTES} are allowed")
        self.changes += 1
        self._most_table_bytes = size
        self._shrink()
        return position

    def _shrink(self) -> None:
        while self._table_bytes > self._most_table_bytes:
            self._table_bytes -= _cost(self._table.pop())


def number(block: bytes, position: int, bits: int) -> tuple[int, int]:
    """The integer in the last bits of a byte and maybe in those behind it, and where it ends."""
    if position >= len(block):
        raise HpackError("the block ends too early")
    mask = (1 << bits) - 1
    value = block[position] & mask
    position += 1
    if value < mask:
        return value, position
    for shift in range(0, 28, 7):
        if position >= len(block):
            raise HpackError("the block ends in the middle of a number")
        byte = block[position]
        position += 1
        value += (byte & 0x7F) << shift
        if byte < 0x80:
            if value > _MOST_NUMBER:
                break
            return value, position
    raise HpackError("a number is larger than any that is needed")


def text(block: bytes, position: int) -> tuple[bytes, int]:
    start = position
    length, position = number(block, position, 7)
    end = position + length
    if end > len(block):
        raise HpackError("the block ends in the middle of a text")
    found = block[position:end]
    if not block[start] & 0x80:
        return found, end
    try:
        return decode(found), end
    except HuffmanError as error:
        raise HpackError(str(error)) from None


def status(code: int) -> bytes:
    value = b"%d" % code
    return _STATUS.get(value) or bytes([_STATUS_NAME]) + _text(value)


def literals(fields: Iterable[Field]) -> bytes:
    """Fields that no table remembers: they need no state, and nobody has to wait for the client to agree on any."""
    return b"".join([b"\0" + _text(name) + _text(value) for name, value in fields])


def _text(value: bytes) -> bytes:
    return _number(len(value), 7) + value


def _number(value: int, bits: int) -> bytes:
    mask = (1 << bits) - 1
    if value < mask:
        return bytes([value])
    value -= mask
    out = bytearray([mask])
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _cost(field: Field) -> int:
    return len(field[0]) + len(field[1]) + _ENTRY_BYTES


# How long the code of each byte is, and last that of the end of the string: A is 1, Z 26, the digit 1 is 27. The code
# is canonical, shorter ones first and equal ones by their symbols, so that the lengths say all of it.
_LENGTHS = (
    "MW2222222X4224222222224222222222FJJLMFHKJJHKHFFFEEEFFFFFFFGHOFLJMFGGGGGGGGGGGGGGGGGGGGGGHGHMSMNF"
    "OEFEFEFFFEGGFFFEFGFEEFGGGGGOKNM2TVTTVVVWVWWWWWXWXXVWXWWWWUVWVWWXVUTVVWWUWVVXUVWWUUVUWVWWTVVVWVVW"
    "ZZTSVWVYZZZ11ZXYSUZ11Z1XUUZZ2111TXTUVUUWVVYYXXZWZ1ZZ11111211111Z4"
)
_END = 256


class HuffmanError(Exception):
    """What no encoder makes."""


def decode(data: bytes) -> bytes:
    state, out, known = 1, [], _STEPS
    for byte in data:
        step = known.get(state << 8 | byte)
        if step is None:
            step = _step(state, byte)
        state, text = step
        out.append(text)
    if state not in _PADDINGS:
        raise HuffmanError("a text ends in the middle of a letter")
    return b"".join(out)


def _step(state: int, byte: int) -> tuple[int, bytes]:
    """Where the byte leads from this state, which is the bits of a code begun, behind a 1, and what it completes.

    Remembered: few of the 65536 steps there are ever happen, and to make all of them at the start takes a while.
    """
    key, made = state << 8 | byte, bytearray()
    for place in range(7, -1, -1):
        state = state << 1 | byte >> place & 1
        symbol = _SYMBOLS.get(state)
        if symbol == _END:
            raise HuffmanError("a text goes on behind its end")
        if symbol is not None:
            made.append(symbol)
            state = 1
    _STEPS[key] = state, bytes(made)
    return _STEPS[key]


def _lengths() -> list[int]:
    return [26 + int(letter) if letter.isdigit() else ord(letter) - ord("A") + 1 for letter in _LENGTHS]


def _symbols() -> dict[int, int]:
    """Each code, behind a 1 that keeps its leading zeros, and what it stands for."""
    lengths, found, code, before = _lengths(), {}, 0, 0
    for length, symbol in sorted((length, symbol) for symbol, length in enumerate(lengths)):
        code <<= length - before
        found[1 << length | code] = symbol
        code, before = code + 1, length
    return found


_SYMBOLS = _symbols()
_STEPS: dict[int, tuple[int, bytes]] = {}
_PADDINGS = frozenset((1 << size + 1) - 1 for size in range(8))  # fewer than 8 bits, all of them 1
