"""Protobuf messages of other programs, of which none is parsed at once that would take too long. Pure."""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

from google.protobuf.message import DecodeError, Message

MOST_FIELDS = 1 << 16
"""Fields that are parsed at once, those in fields among them: no other thread runs meanwhile, 15 ms here."""

FEW_BYTES = 64 << 10
"""A message of so many bytes is never too much for one turn."""

_Message = TypeVar("_Message", bound=Message)

_VARINT, _EIGHT_BYTES, _WITH_LENGTH, _GROUP, _GROUP_END, _FOUR_BYTES = range(6)
_FIXED = {_EIGHT_BYTES: 8, _FOUR_BYTES: 4, _GROUP: 0, _GROUP_END: 0}


class TooManyFields(DecodeError):
    """The message has more than MOST_FIELDS fields."""

    def __init__(self) -> None:
        super().__init__(f"the message has more than {MOST_FIELDS} fields")


def read_message(raw: bytes, message: _Message) -> _Message:
    """`message`, filled from `raw`. Raises DecodeError, TooManyFields among them."""
    if len(raw) > FEW_BYTES and has_many_fields(raw, message.DESCRIPTOR):
        raise TooManyFields
    message.ParseFromString(raw)
    return message


async def read_in_turns(raw: bytes, message: _Message) -> _Message:
    """The same; the fields of a large message are counted and read on a thread."""
    if len(raw) <= FEW_BYTES:
        return read_message(raw, message)
    return await asyncio.to_thread(read_message, raw, message)


def has_many_fields(raw: bytes, kind: Any) -> bool:
    """Whether a message with the descriptor `kind` has more than MOST_FIELDS fields. Takes 0.5 us for each, for at most
    so many.

    Data that are no message are left to the parser, as far as they were read.
    """
    counted, left = 0, [(0, len(raw), kind)]
    try:
        while left:
            at, end, kind = left.pop()
            while at < end:
                counted += 1
                if counted > MOST_FIELDS:
                    return True
                tag, at = _varint(raw, at)
                wire = tag & 7
                if wire == _VARINT:
                    _, at = _varint(raw, at)
                elif wire == _WITH_LENGTH:
                    size, at = _varint(raw, at)
                    field = kind.fields_by_number.get(tag >> 3)
                    if field is not None and field.message_type is not None:
                        left.append((at, min(at + size, end), field.message_type))
                    at += size
                else:
                    # the fields of a group follow its beginning like any others
                    at += _FIXED[wire]
    except LookupError:
        return False
    return False


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    """The number at `at`, and the place behind it. Raises IndexError where it is cut off or too long."""
    value = 0
    for shift in range(0, 70, 7):
        byte = raw[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise IndexError(at)
