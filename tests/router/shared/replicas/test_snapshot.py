from __future__ import annotations

import zlib
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from policies.prefix.residency import Picture, Residency
from router.shared.replicas.snapshot import (
    MOST_KEYS,
    VERSION,
    Header,
    Residence,
    Unfit,
    decode_header,
    decode_piece,
    encode,
)
from tests.work import work_of

HEADER = Header(VERSION, "f00d", 3, "17-4")


def a_picture(count: int = 3, **fields: Any) -> Picture:
    values: dict[str, Any] = {
        "backend": "a",
        "keys": np.arange(1, count + 1, dtype=np.uint64) * np.uint64(2**60 + 7),
        "ages": np.arange(count, dtype=np.uint64),
        "capacity_blocks": 5000.0,
        "idle_s": 1.5,
    }
    return Picture(**(values | fields))


def a_piece(**fields: Any) -> Residence:
    return msgspec.structs.replace(Residence.of(a_picture(), "17-3", counts=True), **fields)


def test_a_picture_comes_back_as_it_was() -> None:
    picture = a_picture(MOST_KEYS)
    piece = decode_piece(encode(Residence.of(picture, "17-3", counts=True)))
    assert piece is not None
    assert (piece.backend, piece.position, piece.counts) == ("a", "17-3", True)
    back = piece.picture()
    assert (back.keys.tolist(), back.ages.tolist()) == (picture.keys.tolist(), picture.ages.tolist())
    assert (back.capacity_blocks, back.idle_s) == (picture.capacity_blocks, picture.idle_s)
    assert decode_header(encode(HEADER)) == HEADER


@given(some.data())
def test_of_bytes_that_were_changed_or_cut_nothing_is_believed(data: some.DataObject) -> None:
    part = data.draw(some.sampled_from([HEADER, a_piece()]))
    sealed = bytearray(encode(part))
    if data.draw(some.booleans()):
        at = data.draw(some.integers(0, len(sealed) - 1))
        sealed[at] ^= data.draw(some.integers(1, 255))
    else:
        del sealed[data.draw(some.integers(0, len(sealed) - 1)) :]
    with pytest.raises(Unfit, match="broken"):
        (decode_header if part is HEADER else decode_piece)(bytes(sealed))


@given(some.binary(max_size=200))
def test_what_was_sealed_well_and_is_nonsense_is_broken_or_foreign(payload: bytes) -> None:
    sealed = encode(msgspec.Raw(payload))  # type: ignore[arg-type]
    for decode in (decode_header, decode_piece):
        try:
            decode(sealed)
        except Unfit as unfit:
            assert unfit.why in {"broken", "foreign"}  # noqa: PT017 - some nonsense is of another kind


@pytest.mark.parametrize(
    "fields",
    [
        {"keys": b"1234567"},
        {"ages": b""},
        {"capacity_blocks": float("nan")},
        {"capacity_blocks": -1.0},
        {"idle_ms": -1},
        {"position": "yesterday"},
        {"keys": bytes(8 * (MOST_KEYS + 1)), "ages": bytes(4 * (MOST_KEYS + 1))},
    ],
)
def test_a_piece_that_cannot_be_true_is_broken(fields: dict[str, Any]) -> None:
    with pytest.raises(Unfit, match="broken"):
        decode_piece(encode(a_piece(**fields)))


def test_another_version_is_foreign_whatever_follows() -> None:
    foreign = msgspec.msgpack.encode([VERSION + 1, {"all": "new"}])
    with pytest.raises(Unfit, match="foreign"):
        decode_header(encode(msgspec.Raw(foreign)))  # type: ignore[arg-type]


@pytest.mark.parametrize("depth", [128, 5_000])
def test_what_is_nested_too_deeply_is_broken_whatever_it_is(depth: int) -> None:
    deep = msgspec.msgpack.encode([VERSION, "kind", msgspec.Raw(b"\x91" * depth + b"\xc0")])
    for decode in (decode_header, decode_piece):
        with pytest.raises(Unfit, match="broken"):
            decode(encode(msgspec.Raw(deep)))  # type: ignore[arg-type]


def test_pieces_of_kinds_that_are_not_known_are_passed_over() -> None:
    assert decode_piece(encode(msgspec.Raw(msgspec.msgpack.encode(["pin", 1])))) is None  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [0, 1, MOST_KEYS, MOST_KEYS + 1, 5 * MOST_KEYS])
def test_the_parts_of_a_picture_are_it_and_small(count: int) -> None:
    picture = a_picture(count)
    parts = list(picture.parts(MOST_KEYS))
    assert all(len(part) <= MOST_KEYS for part in parts)
    assert np.concatenate([part.keys for part in parts]).tolist() == picture.keys.tolist()
    assert np.concatenate([part.ages for part in parts]).tolist() == picture.ages.tolist()
    assert parts[0].capacity_blocks == picture.capacity_blocks


def test_the_same_part_taken_over_twice_changes_nothing() -> None:
    residency = Residency()
    picture = a_picture(100)
    residency.take_over(picture, 10.0)
    before = residency.picture("a", 1000, 10.0)
    residency.take_over(picture, 10.0)
    after = residency.picture("a", 1000, 10.0)
    assert before is not None
    assert after is not None
    assert sorted(zip(before.keys, before.ages, strict=True)) == sorted(zip(after.keys, after.ages, strict=True))
    residency.check()


def test_a_part_that_is_longer_than_any_is_broken_unread() -> None:
    payload = b"\xdf\xff\xff\xff\xff" + b"\x80" * (1 << 20)
    sealed = zlib.crc32(payload).to_bytes(4, "little") + payload
    for read in (decode_header, decode_piece):
        with pytest.raises(Unfit, match="broken"):
            read(sealed)


def test_a_part_of_any_size_is_little_work() -> None:
    def run() -> None:
        with suppress(Unfit):
            decode_piece(bytes(4) + b"\x80" * (4 << 20))

    assert work_of(run).lines < 100
