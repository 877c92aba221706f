"""The Huffman code of HPACK (RFC 7541, appendix B): texts of headers, decoded a byte at a time."""

from __future__ import annotations

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
