"""The bytes between two shards: nothing that was changed, cut off or asked for too much gets through."""

from __future__ import annotations

import math
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from shards.kv.peer_identity import PeerIdentity
from shards.kv.peer_wire import (
    MOST_OFFERED,
    MOST_WANTED,
    Offer,
    OfferedBlock,
    PeerRefused,
    ask,
    give,
    greet,
    next_request,
    offer,
    reply,
    take,
    welcome,
)
from shards.kv.raw_block import BlockLabel, BlockLabels, BrokenBlock

OURS = PeerIdentity(bytes(32), b"a secret")
HELLO = struct.pack("<16s32s", b"pointsman-peer\x00\x03", bytes(32))
Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """A borrower's end and a lender's end."""
    ends = socket.socketpair()
    for end in ends:
        end.settimeout(5)
    yield ends
    for end in ends:
        end.close()


def labels(count: int) -> list[BlockLabel]:
    made = BlockLabels("m", bytes(32))
    found = [made.first(bytes(256), domain="acme")]
    while len(found) < count:
        found.append(made.after(found[-1], bytes([len(found) % 256]) * 256))
    return found


def beside(work: Callable[[], object]) -> threading.Thread:
    def quietly() -> None:
        with suppress(OSError, PeerRefused):
            work()

    thread = threading.Thread(target=quietly)
    thread.start()
    return thread


def test_both_ends_prove_that_they_know_the_secret(pair: Pair) -> None:
    other = beside(lambda: welcome(pair[1], OURS))
    greet(pair[0], OURS)
    other.join()


@pytest.mark.parametrize(
    ("theirs", "why"),
    [(PeerIdentity(bytes(32), b"another"), "secret"), (PeerIdentity(b"x" * 32, b"a secret"), "another model")],
)
def test_each_end_refuses_another_secret_and_other_kv(pair: Pair, theirs: PeerIdentity, why: str) -> None:
    def lend() -> None:
        with pair[1]:
            welcome(pair[1], theirs)

    other = beside(lend)
    with pytest.raises(PeerRefused, match=why):
        greet(pair[0], OURS)
    pair[0].close()
    other.join()


@pytest.mark.parametrize("theirs", [PeerIdentity(bytes(32), b"another"), PeerIdentity(b"x" * 32, b"a secret")])
def test_a_borrower_of_another_kind_is_not_welcome(pair: Pair, theirs: PeerIdentity) -> None:
    def borrow() -> None:
        with pair[0]:
            greet(pair[0], theirs)

    other = beside(borrow)
    with pytest.raises((PeerRefused, ConnectionError), match=r"another model|secret"):
        welcome(pair[1], OURS)
    other.join()


def test_a_borrower_that_only_guesses_is_refused(pair: Pair) -> None:
    pair[0].sendall(HELLO + bytes(64))
    with pytest.raises(PeerRefused, match="secret"):
        welcome(pair[1], OURS)


def test_a_stranger_that_connects_gets_a_nonce_and_nothing_to_try_secrets_on(pair: Pair) -> None:
    pair[0].sendall(HELLO + bytes(64))
    with pytest.raises(PeerRefused):
        welcome(pair[1], OURS)
    pair[1].close()
    got = b"".join(iter(lambda: pair[0].recv(1 << 16), b""))
    assert len(got) == len(HELLO)
    assert got[:16] == HELLO[:16]
    assert OURS.fingerprint not in got


def test_another_fingerprint_cannot_be_put_into_a_proof_on_its_way(pair: Pair) -> None:
    """What a man in the middle changes is refused as a wrong secret."""
    foreign = PeerIdentity(b"x" * 32, OURS.key)
    sent: list[bytes] = []

    class Between:
        def recv(self, size: int, /) -> bytes:
            return pair[0].recv(size)

        def recv_into(self, buffer: memoryview, /) -> int:
            return pair[0].recv_into(buffer)

        def sendall(self, data: bytes | memoryview, /) -> None:
            sent.append(bytes(data))
            pair[0].sendall(bytes(data).replace(foreign.fingerprint, OURS.fingerprint))

    other = beside(lambda: greet(Between(), foreign))
    with pytest.raises(PeerRefused, match="secret"):
        welcome(pair[1], OURS)
    pair[1].close()
    other.join()
    assert foreign.fingerprint in sent[1]


def test_another_protocol_is_refused(pair: Pair) -> None:
    pair[0].sendall(b"GET / HTTP/1.1\r\n" * 5)
    with pytest.raises(PeerRefused, match="another protocol"):
        welcome(pair[1], OURS)


def test_labels_arrive_as_they_were_sent_and_the_end_of_a_connection_is_no_error(pair: Pair) -> None:
    ask(pair[0], labels(3))
    assert next_request(pair[1], bytes(32)) == labels(3)
    pair[0].close()
    assert next_request(pair[1], bytes(32)) is None


@pytest.mark.parametrize("count", [0, MOST_WANTED + 1])
def test_nothing_and_too_much_cannot_be_asked_for(pair: Pair, count: int) -> None:
    pair[0].sendall(b"W" + struct.pack("<H", count))
    with pytest.raises(PeerRefused, match=f"{count} blocks"):
        next_request(pair[1], bytes(32))


def some_offer(*blocks: OfferedBlock) -> Offer:
    return Offer("shard:7002", "acmé", True, blocks)


def test_an_offer_arrives_as_it_was_sent_and_is_answered_block_by_block(pair: Pair) -> None:
    sent = some_offer(OfferedBlock(-1, 0.5, bytes(256)), OfferedBlock(0, -2.0, b"t" * 256))
    answers: list[list[bool]] = []
    thread = threading.Thread(target=lambda: answers.append(offer(pair[0], sent)))
    thread.start()
    got = next_request(pair[1], bytes(32))
    assert isinstance(got, Offer)
    assert (*got[:3], tuple(got.blocks)) == sent
    reply(pair[1], [True, False])
    thread.join()
    assert answers == [[True, False]]


@pytest.mark.parametrize("count", [0, MOST_OFFERED + 1])
def test_nothing_and_too_much_cannot_be_offered(pair: Pair, count: int) -> None:
    pair[0].sendall(b"O" + struct.pack("<?BHI", True, 0, 0, count))
    with pytest.raises(PeerRefused, match=f"offers {count} blocks"):
        next_request(pair[1], bytes(32))


@pytest.mark.parametrize(("parent", "age"), [(0, 0.0), (-2, 0.0), (-1, math.nan), (-1, math.inf)])
def test_a_block_before_its_parent_or_without_an_age_cannot_be_offered(pair: Pair, parent: int, age: float) -> None:
    pair[0].sendall(b"O" + struct.pack("<?BHI", True, 0, 0, 1) + struct.pack("<id256s", parent, age, bytes(256)))
    with pytest.raises(PeerRefused, match="before its parent, or no age"):
        next_request(pair[1], bytes(32))


def test_a_domain_that_is_no_text_cannot_be_offered(pair: Pair) -> None:
    pair[0].sendall(b"O" + struct.pack("<?BHI", True, 0, 1, 1) + b"\xff")
    with pytest.raises(PeerRefused, match="not UTF-8"):
        next_request(pair[1], bytes(32))


def test_a_request_of_another_kind_is_refused(pair: Pair) -> None:
    pair[0].sendall(b"?")
    with pytest.raises(PeerRefused, match="does not know"):
        next_request(pair[1], bytes(32))


def test_a_block_arrives_in_its_pieces_or_is_missing(pair: Pair) -> None:
    give(pair[1], [memoryview(b"keys"), memoryview(b"values")])
    give(pair[1], None)
    pieces = [memoryview(bytearray(5)), memoryview(bytearray(5))]
    assert take(pair[0], pieces)
    assert b"".join(pieces) == b"keysvalues"
    assert not take(pair[0], pieces)


def test_changed_bytes_another_size_and_a_broken_connection_are_found(pair: Pair) -> None:
    pieces = [memoryview(bytearray(4))]
    pair[1].sendall(struct.pack("<?Q16s", True, 4, bytes(16)) + b"keys")
    with pytest.raises(BrokenBlock, match="changed"):
        take(pair[0], pieces)
    pair[1].sendall(struct.pack("<?Q16s", True, 5, bytes(16)))
    with pytest.raises(BrokenBlock, match="5 bytes"):
        take(pair[0], pieces)
    pair[1].sendall(struct.pack("<?Q16s", True, 4, bytes(16)) + b"ke")
    pair[1].close()
    with pytest.raises(ConnectionError, match="within a block"):
        take(pair[0], pieces)
    with pytest.raises(ConnectionError, match="closed"):
        take(pair[0], pieces)
