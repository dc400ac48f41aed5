"""A snapshot of learned blocks of backends without cache events, up to a position in the stream; its encoding.

Each part is the CRC-32 of the rest, little-endian, and MessagePack. A header starts with the version.
"""

from __future__ import annotations

import zlib
from typing import Annotated

import msgspec
import numpy as np

from backends.nesting import TooDeep, check_msgpack
from policies.prefix.residency import Picture

VERSION = 1

MOST_KEYS = 1024
"""Most keys of one piece (12 KiB): taking it over blocks the event loop for 2 to 3 ms (busy 2.5 GHz core, 2026-11)."""

KEY_BYTES = 12
MOST_BYTES = 8 * 2**20
"""Most bytes of keys in a snapshot: 700,000 blocks, or 45 million tokens. Beyond, the newest of each backend stay."""

_MOST_PART_BYTES = 64 << 10
"""Of a part: a piece has 12 KiB of keys, and names."""

MOST_PIECES = 2 * MOST_BYTES // (KEY_BYTES * MOST_KEYS) + 4096
"""Each backend begins a new piece."""

_MOST_AGE = 2**32 - 1

Place = Annotated[str, msgspec.Meta(pattern=r"^[0-9]{1,19}-[0-9]{1,19}$")]


class Unfit(Exception):
    """A snapshot that cannot be used: `broken`, `old` or `foreign`."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


class Header(msgspec.Struct, frozen=True, array_like=True):
    """Snapshot `name` has `pieces` pieces. Entries of the stream after `position` may be missing in it."""

    version: int
    name: str
    pieces: Annotated[int, msgspec.Meta(ge=0, le=MOST_PIECES)]
    position: Place


class Residence(msgspec.Struct, frozen=True, array_like=True, tag="residence"):
    """A part of a Picture that includes all entries about its backend up to `position`.

    `keys` are little-endian 64-bit, `ages` 32-bit. `counts`: the backend has reported cached tokens before.
    """

    backend: str
    position: Place
    capacity_blocks: Annotated[float, msgspec.Meta(ge=1, le=2**40)]
    idle_ms: Annotated[int, msgspec.Meta(ge=0, le=2**50)]
    counts: bool
    keys: Annotated[bytes, msgspec.Meta(max_length=8 * MOST_KEYS)]
    ages: Annotated[bytes, msgspec.Meta(max_length=4 * MOST_KEYS)]

    @classmethod
    def of(cls, picture: Picture, position: str, *, counts: bool) -> Residence:
        """The piece with `picture`, which has at most MOST_KEYS keys."""
        keys = picture.keys.astype("<u8").tobytes()
        ages = np.minimum(picture.ages, _MOST_AGE).astype("<u4").tobytes()
        idle_ms = round(picture.idle_s * 1000)
        return cls(picture.backend, position, picture.capacity_blocks, idle_ms, counts, keys, ages)

    def picture(self) -> Picture:
        """The picture that it is a part of."""
        keys = np.frombuffer(self.keys, "<u8").astype(np.uint64)
        ages = np.frombuffer(self.ages, "<u4").astype(np.uint64)
        return Picture(self.backend, keys, ages, self.capacity_blocks, self.idle_ms / 1000)


class _Version(msgspec.Struct, array_like=True):
    version: int


class _Kind(msgspec.Struct, array_like=True):
    kind: str


_encoder = msgspec.msgpack.Encoder()
_versions, _headers = msgspec.msgpack.Decoder(_Version), msgspec.msgpack.Decoder(Header)
_kinds, _pieces = msgspec.msgpack.Decoder(_Kind), msgspec.msgpack.Decoder(Residence)
_KINDS = frozenset({str(Residence.__struct_config__.tag)})


def encode(part: Header | Residence) -> bytes:
    """The bytes of `part`."""
    payload = _encoder.encode(part)
    return zlib.crc32(payload).to_bytes(4, "little") + payload


def decode_header(sealed: bytes) -> Header:
    """The header in `sealed`. Raises Unfit."""
    payload = _opened(sealed)
    try:
        if _versions.decode(payload).version != VERSION:
            raise Unfit("foreign")
        return _headers.decode(payload)
    except (ValueError, RecursionError) as error:
        raise Unfit("broken") from error


def decode_piece(sealed: bytes) -> Residence | None:
    """The piece in `sealed`; None if its kind is unknown here. Raises Unfit."""
    payload = _opened(sealed)
    try:
        piece = _pieces.decode(payload)
    except (ValueError, RecursionError) as error:
        if _is_of_another_kind(payload):
            return None
        raise Unfit("broken") from error
    # NaN is neither too small nor too large
    if len(piece.keys) != 2 * len(piece.ages) or len(piece.keys) % 8 or piece.capacity_blocks != piece.capacity_blocks:
        raise Unfit("broken")
    return piece


def _is_of_another_kind(payload: bytes) -> bool:
    try:
        return _kinds.decode(payload).kind not in _KINDS
    except (ValueError, RecursionError):
        return False


def _opened(sealed: bytes) -> bytes:
    payload = sealed[4:]
    if len(payload) > _MOST_PART_BYTES or zlib.crc32(payload) != int.from_bytes(sealed[:4], "little") or not payload:
        raise Unfit("broken")
    try:
        check_msgpack(payload)
    except TooDeep as error:
        raise Unfit("broken") from error
    return payload
