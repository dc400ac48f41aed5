"""Packed token ids: little-endian uint32 in `bytes`."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence

from shards.kv.keys import TOKEN_BYTES


def pack(ids: Sequence[int]) -> bytes:
    """`ids` as bytes. Raises TypeError for other types, OverflowError outside 0 .. 2**32 - 1."""
    return _swapped(array("I", ids)).tobytes()


def unpack(token_ids: bytes) -> array[int]:
    """The ids in `token_ids`."""
    return _swapped(array("I", token_ids))


def count(token_ids: bytes) -> int:
    """The number of ids in `token_ids`."""
    return len(token_ids) // TOKEN_BYTES


def _swapped(ids: array[int]) -> array[int]:
    if sys.byteorder == "big":
        ids.byteswap()
    return ids
