"""How deeply the data of other programs may be nested, and how many values they may have, to be decoded at once. Pure.

JSON comes from clients and backends, MessagePack from engines and Redis.

msgspec has a limit of its own, which depends on the Python below it: about 1,000 levels on 3.11, 10,000 on 3.13. Code
that reads decoded values calls itself once per level and ends far earlier. So this limit is the same on every Python.
"""

from __future__ import annotations

from typing import Any, TypeVar, overload

import msgspec

MOST_LEVELS = 128
"""Arrays and objects within one another. JSON Schemas, the deepest data that clients send, have about 20."""

MOST_AT_ONCE = 1 << 17
"""Values that are decoded at once, at most: no other thread runs meanwhile, 15 ms here."""

FEW_BYTES = 256 << 10
"""Data that are never too much for one turn."""

_COUNTED_BYTES = 64 << 10
"""How much is counted before it is known whether it is enough."""

T = TypeVar("T")


class TooDeep(msgspec.DecodeError):
    """The data has more than MOST_LEVELS levels."""

    def __init__(self) -> None:
        super().__init__(f"nested more than {MOST_LEVELS} levels deep")


@overload
def decode_json(text: bytes | str | msgspec.Raw) -> Any: ...
@overload
def decode_json(text: bytes | str | msgspec.Raw, kind: type[T]) -> T: ...
def decode_json(text: bytes | str | msgspec.Raw, kind: Any = Any) -> Any:
    """The JSON value in `text`, as a `kind`.

    Raises TooDeep, and what msgspec raises: DecodeError, ValidationError (both as TooDeep) or UnicodeDecodeError.
    """
    if isinstance(text, msgspec.Raw):
        text = bytes(text)
    try:
        # each level needs a bracket, and most bodies have fewer than the limit, those in texts included. Python finds
        # single bytes fifty times as fast as it counts them: 10 us per MB
        brackets = 0
        for bracket in ("[", "{") if isinstance(text, str) else (b"[", b"{"):
            at = text.find(bracket)  # type: ignore[arg-type]
            while at >= 0 and brackets <= MOST_LEVELS:
                brackets += 1
                at = text.find(bracket, at + 1)  # type: ignore[arg-type]
        if brackets <= MOST_LEVELS:
            return msgspec.json.decode(text, type=kind)
        value = msgspec.json.decode(text)
        if is_deep(value):
            raise TooDeep
        return value if kind is Any else msgspec.json.decode(text, type=kind)
    except RecursionError:
        raise TooDeep from None


def has_many_values(data: bytes | bytearray, most: int = MOST_AT_ONCE) -> bool:
    """Whether JSON `data` may have more than `most` values: counted are commas and opening brackets, in texts too."""
    if len(data) <= FEW_BYTES:
        return False
    counted = 0
    for at in range(0, len(data), _COUNTED_BYTES):
        counted += sum(data.count(mark, at, at + _COUNTED_BYTES) for mark in (b",", b"[", b"{"))
        if counted > most:
            return True
    return False


def decode_page(page: bytes) -> Any:
    """The JSON value in a page that an engine shows about itself, which has few values.

    Raises DecodeError, TooDeep among them, or UnicodeDecodeError.
    """
    if has_many_values(page):
        raise msgspec.DecodeError(f"it has more than {MOST_AT_ONCE} values")
    return decode_json(page)


def is_deep(value: object) -> bool:
    """Whether a decoded value has more than MOST_LEVELS levels of lists, tuples and dicts."""
    level = [value] if isinstance(value, _CONTAINERS) else []
    for _ in range(MOST_LEVELS):
        level = [
            part
            for whole in level
            for part in (whole.values() if isinstance(whole, dict) else whole)
            if isinstance(part, _CONTAINERS)
        ]
        if not level:
            return False
    return bool(level)


def check_msgpack(payload: bytes) -> None:
    """Raise TooDeep if MessagePack data has more than MOST_LEVELS levels. Takes 80 ns for each value.

    Data that ends early or is not MessagePack raises nothing here: its decoder rejects it.
    """
    outer: list[int] = []  # for each array and map around the current one: how many of its values follow
    left, at = 1, 0  # values that follow in the current array or map, and where the next one begins
    while at < len(payload):
        while not left:
            if not outer:
                return
            left = outer.pop()
        left -= 1
        first = payload[at]
        length_ends = at + 1 + _LENGTH_BYTES[first]
        size = _SIZE[first] + int.from_bytes(payload[at + 1 : length_ends], "big")
        at = length_ends
        if each := _VALUES_EACH[first]:
            if len(outer) == MOST_LEVELS:
                raise TooDeep
            outer.append(left)
            left = each * size
        else:
            at += size


def _tables() -> tuple[bytes, bytes, bytes]:
    """MessagePack's types by a value's first byte.

    How many bytes of length follow it; the length that it states itself, or what is added to the length that follows;
    and what the length counts: 0 for bytes, 1 for the values of an array, 2 for the keys and values of a map.
    """
    length_bytes, size, values_each = bytearray(256), bytearray(256), bytearray(256)
    size[0x80:0x90] = size[0x90:0xA0] = range(16)
    size[0xA0:0xC0] = range(32)
    size[0xC7:0xCA] = (1, 1, 1)  # an extension has a byte with its type
    size[0xCA:0xD4] = (4, 8, 1, 2, 4, 8, 1, 2, 4, 8)  # floats, unsigned and signed integers
    size[0xD4:0xD9] = (2, 3, 5, 9, 17)  # extensions of fixed length
    length_bytes[0xC4:0xCA] = (1, 2, 4, 1, 2, 4)
    length_bytes[0xD9:0xE0] = (1, 2, 4, 2, 4, 2, 4)
    values_each[0x80:0xA0] = bytes(16 * [2] + 16 * [1])
    values_each[0xDC:0xE0] = (1, 1, 2, 2)
    return bytes(length_bytes), bytes(size), bytes(values_each)


_CONTAINERS = (list, tuple, dict)
_LENGTH_BYTES, _SIZE, _VALUES_EACH = _tables()
