"""Bodies that were sent compressed."""

import gzip
import random
import zlib

import pytest

from http1.coding import CODINGS, PIECE_BYTES, BadCoding, Decoder, decoded
from http1.errors import BodyTooLarge

PLAIN = bytes(random.Random(1).choices(b"abc", k=20_000))


def encoded(coding: str, body: bytes = PLAIN) -> bytes:
    raw_deflate = zlib.compressobj(wbits=-15)
    encoders = {
        "identity": bytes,
        "gzip": gzip.compress,
        "deflate": zlib.compress,
        "deflate without zlib's wrapper": lambda data: raw_deflate.compress(data) + raw_deflate.flush(),
    }
    return encoders[coding](body)


@pytest.mark.parametrize("coding", [*CODINGS, "deflate without zlib's wrapper"])
@pytest.mark.parametrize("size", [1, 100, 1 << 20])
def test_a_body_is_decoded_in_any_pieces(coding: str, size: int) -> None:
    name = coding.partition(" ")[0]
    body, decoder = encoded(coding), Decoder(name, len(PLAIN))
    decoded_body = b"".join(decoder.feed(body[at : at + size]) for at in range(0, len(body), size))
    decoder.end()
    assert decoded_body == PLAIN == decoded(body, name, len(PLAIN))


@pytest.mark.parametrize("coding", CODINGS)
def test_an_empty_body_says_nothing(coding: str) -> None:
    assert decoded(b"", coding, 0) == b""


@pytest.mark.parametrize("coding", CODINGS)
def test_a_body_that_becomes_too_large_is_refused(coding: str) -> None:
    assert decoded(encoded(coding), coding, len(PLAIN)) == PLAIN
    with pytest.raises(BodyTooLarge, match="19999"):
        decoded(encoded(coding), coding, len(PLAIN) - 1)


def test_a_bomb_is_not_unpacked() -> None:
    bomb = gzip.compress(bytes(10_000_000), 1)
    with pytest.raises(BodyTooLarge):
        decoded(bomb, "gzip", 1000)


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
@pytest.mark.parametrize("break_it", [lambda body: body[:-3], lambda body: b"xyz" + body, lambda body: body + b"more"])
def test_a_body_that_is_not_what_it_says_is_refused(coding: str, break_it: object) -> None:
    assert callable(break_it)
    with pytest.raises(BadCoding):
        decoded(break_it(encoded(coding)), coding, 1 << 20)


def test_few_bytes_that_stand_for_many_are_decoded_in_pieces() -> None:
    whole = b"a" * (8 << 20)
    pieces = list(Decoder("gzip", len(whole)).pieces(gzip.compress(whole)))
    assert b"".join(pieces) == whole
    assert max(map(len, pieces)) <= PIECE_BYTES
