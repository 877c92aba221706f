"""HPACK, the header compression of HTTP/2 (RFC 7541).

Requests are decoded in full. Answers are encoded as literals without a table: that needs no state.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

Field = tuple[bytes, bytes]

TABLE_BYTES = 4096  # of the client's dynamic table: the default of SETTINGS_HEADER_TABLE_SIZE
_ENTRY_BYTES = 32  # overhead that the standard adds to each entry
_BOMB_FACTOR = 4
_BYTES_PER_FIELD = 32  # so many bytes of strings, possibly Huffman-coded, cost about as much as a field
_MAX_INTEGER = 1 << 24  # larger than any index, length or size can be
_NAMES_WITHOUT_VALUE = (
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
    *((b":status", encode_status) for encode_status in (b"200", b"204", b"206", b"304", b"400", b"404", b"500")),
    *((name.encode(), b"gzip, deflate" if name == "accept-encoding" else b"") for name in _NAMES_WITHOUT_VALUE.split()),
)
_STATUS = {value: bytes([0x80 | index]) for index, (name, value) in enumerate(STATIC, 1) if name == b":status"}
_STATUS_INDEX = 8  # the first entry of `:status`


class HpackError(Exception):
    """A header block cannot be decoded: the state is lost, and the connection has to end."""


class HpackBomb(HpackError):
    """A header block is far larger decoded than it may be."""


class Decoder:
    """Decoder of one connection. While `table_version` stays the same, equal bytes decode to equal fields."""

    def __init__(self, max_list_bytes: int) -> None:
        self._max_list_bytes = max_list_bytes
        self._table: deque[Field] = deque()  # newest first
        self._table_bytes = 0
        self._max_table_bytes = TABLE_BYTES
        self.table_version = 0
        self.decoded_fields = 0  # the cost of all decoding: fields, and bytes at the price of a part of a field

    def decode(self, block: bytes) -> list[Field] | None:
        """Return the fields; None where the list is too long. The table is updated in both cases.

        A list that is several times too long is no mistake but a bomb: it raises HpackBomb after a bounded time.
        """
        fields: list[Field] = []
        size = position = 0
        self.decoded_fields += len(block) // _BYTES_PER_FIELD
        while position < len(block):
            byte = block[position]
            self.decoded_fields += 1
            if byte & 0xE0 == 0x20:
                if fields or size:
                    raise HpackError("a table size update must come before the first field")
                position = self._resize(block, position)
                continue
            if byte & 0x80:
                index, position = decode_integer(block, position, 7)
                field = self._field(index)
            else:
                field, position = self._literal(block, position, 6 if byte & 0x40 else 4)
                if byte & 0x40:
                    self._add(field)
            size += len(field[0]) + len(field[1]) + _ENTRY_BYTES
            if size <= self._max_list_bytes:
                fields.append(field)
            elif size > _BOMB_FACTOR * self._max_list_bytes:
                raise HpackBomb(f"a header list has more than {_BOMB_FACTOR} times the allowed size")
        return fields if size <= self._max_list_bytes else None

    def _literal(self, block: bytes, position: int, bits: int) -> tuple[Field, int]:
        index, position = decode_integer(block, position, bits)
        if index:
            name = self._field(index)[0]
        else:
            name, position = decode_string(block, position)
        value, position = decode_string(block, position)
        return (name, value), position

    def _field(self, index: int) -> Field:
        if 0 < index <= len(STATIC):
            return STATIC[index - 1]
        index_in_table = index - len(STATIC) - 1
        if not 0 <= index_in_table < len(self._table):
            raise HpackError(f"there is no field with index {index}")
        return self._table[index_in_table]

    def _add(self, field: Field) -> None:
        self.table_version += 1
        self._table.appendleft(field)
        self._table_bytes += _cost(field)
        self._shrink()

    def _resize(self, block: bytes, position: int) -> int:
        size, position = decode_integer(block, position, 5)
        if size > TABLE_BYTES:
            raise HpackError(f"a table of {size} bytes is larger than the maximum of {TABLE_BYTES}")
        self.table_version += 1
        self._max_table_bytes = size
        self._shrink()
        return position

    def _shrink(self) -> None:
        while self._table_bytes > self._max_table_bytes:
            self._table_bytes -= _cost(self._table.pop())


def decode_integer(block: bytes, position: int, bits: int) -> tuple[int, int]:
    """Return an integer that begins with the last `bits` of a byte (RFC 7541, 5.1), and the position after it."""
    if position >= len(block):
        raise HpackError("the block is truncated")
    mask = (1 << bits) - 1
    value = block[position] & mask
    position += 1
    if value < mask:
        return value, position
    for shift in range(0, 28, 7):
        if position >= len(block):
            raise HpackError("the block ends within an integer")
        byte = block[position]
        position += 1
        value += (byte & 0x7F) << shift
        if byte < 0x80:
            if value > _MAX_INTEGER:
                break
            return value, position
    raise HpackError(f"an integer is larger than {_MAX_INTEGER}")


def decode_string(block: bytes, position: int) -> tuple[bytes, int]:
    start = position
    length, position = decode_integer(block, position, 7)
    end = position + length
    if end > len(block):
        raise HpackError("the block ends within a string")
    data = block[position:end]
    return huffman_decode(data) if block[start] & 0x80 else data, end


def encode_status(code: int) -> bytes:
    value = b"%d" % code
    return _STATUS.get(value) or bytes([_STATUS_INDEX]) + _encode_string(value)


def encode_literals(fields: Iterable[Field]) -> bytes:
    """Encode fields as literals without indexing."""
    return b"".join([b"\0" + _encode_string(name) + _encode_string(value) for name, value in fields])


def _encode_string(value: bytes) -> bytes:
    size = len(value)
    return b"%c%b" % (size, value) if size < 0x7F else _encode_length(size) + value


def _encode_length(value: int) -> bytes:
    """Encode a length that does not fit into the first byte with its seven bits."""
    value -= 0x7F
    out = bytearray([0x7F])
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _cost(field: Field) -> int:
    return len(field[0]) + len(field[1]) + _ENTRY_BYTES


# The Huffman code of RFC 7541, appendix B: the length of each byte's code, and last that of the end of the string (A is
# 1, Z is 26, the digit 1 is 27). The code is canonical, so the lengths define it.
_LENGTHS = (
    "MW2222222X4224222222224222222222FJJLMFHKJJHKHFFFEEEFFFFFFFGHOFLJMFGGGGGGGGGGGGGGGGGGGGGGHGHMSMNF"
    "OEFEFEFFFEGGFFFEFGFEEFGGGGGOKNM2TVTTVVVWVWWWWWXWXXVWXWWWWUVWVWWXVUTVVWWUWVVXUVWWUUVUWVWWTVVVWVVW"
    "ZZTSVWVYZZZ11ZXYSUZ11Z1XUUZZ2111TXTUVUUWVVYYXXZWZ1ZZ11111211111Z4"
)
_END = 256


def huffman_decode(data: bytes) -> bytes:
    """Decode a byte at a time, with a table of steps that is filled as needed."""
    state, out, steps = 1, [], _STEPS
    for byte in data:
        step = steps.get(state << 8 | byte)
        if step is None:
            step = _step(state, byte)
        state, decoded = step
        out.append(decoded)
    if state not in _PADDINGS:
        raise HpackError("a Huffman string ends within a code")
    return b"".join(out)


def _step(state: int, byte: int) -> tuple[int, bytes]:
    """Return the next state and the bytes decoded by it. A state is a 1 followed by the bits of an incomplete code.

    Steps are cached as they occur: few of the possible 65536 do, and computing all of them would slow the start.
    """
    key, decoded = state << 8 | byte, bytearray()
    for bit in range(7, -1, -1):
        state = state << 1 | byte >> bit & 1
        symbol = _SYMBOLS.get(state)
        if symbol == _END:
            raise HpackError("a Huffman string continues after its end")
        if symbol is not None:
            decoded.append(symbol)
            state = 1
    _STEPS[key] = state, bytes(decoded)
    return _STEPS[key]


def _symbols() -> dict[int, int]:
    """Return the symbol of each code; a leading 1 keeps the code's leading zeros."""
    lengths = [26 + int(letter) if letter.isdigit() else ord(letter) - ord("A") + 1 for letter in _LENGTHS]
    symbols, code, previous = {}, 0, 0
    for length, symbol in sorted((length, symbol) for symbol, length in enumerate(lengths)):
        code <<= length - previous
        symbols[1 << length | code] = symbol
        code, previous = code + 1, length
    return symbols


_SYMBOLS = _symbols()
_STEPS: dict[int, tuple[int, bytes]] = {}
_PADDINGS = frozenset((1 << size + 1) - 1 for size in range(8))  # fewer than 8 bits, all of them 1
