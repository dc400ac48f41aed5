"""The port for KV: so many connections, and none that keeps a block."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Sequence

import pytest

from shards.kv import peer_server
from shards.kv.lending import MOST_LOANS, Lent, Loan
from shards.kv.offers import OpenOffer
from shards.kv.peer_identity import PeerIdentity
from shards.kv.peer_server import PeerServer
from shards.kv.peer_wire import Offer, OfferedBlock, ask, greet, offer, take
from shards.kv.raw_block import BlockLabel, BlockLabels

OURS = PeerIdentity(bytes(32), b"a secret")


class Lender:
    """Hands out one block of 8 bytes for each label, and remembers its loans."""

    def __init__(self) -> None:
        self.loans: list[Loan] = []
        self.has = True

    def __call__(self, labels: Sequence[BlockLabel]) -> Loan:
        loan = Loan(labels)
        for slot, _ in enumerate(labels):
            loan.hand_over(Lent(slot, (memoryview(b"KV" * 4),)) if self.has else None)
        self.loans.append(loan)
        return loan


def consider(offer: Offer) -> OpenOffer:
    """Take every second block of `offer`."""
    opened = OpenOffer(offer, [])
    opened.end([at % 2 == 0 for at in range(len(offer.blocks))])
    return opened


@pytest.fixture
def lender() -> Lender:
    return Lender()


@pytest.fixture
def server(lender: Lender) -> Iterator[PeerServer]:
    server = PeerServer("127.0.0.1", 0, OURS, lender, consider)
    yield server
    server.close()


def connected(server: PeerServer) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", server.port), 5)
    connection.settimeout(5)
    return connection


def some_labels(count: int) -> list[BlockLabel]:
    labels = BlockLabels("m", bytes(32))
    found = [labels.first(bytes(256), domain="")]
    while len(found) < count:
        found.append(labels.after(found[-1], bytes(256)))
    return found


def test_blocks_are_sent_and_given_back(server: PeerServer, lender: Lender) -> None:
    piece = memoryview(bytearray(8))
    with connected(server) as connection:
        greet(connection, OURS)
        for _ in range(2):
            ask(connection, some_labels(3))
            assert [take(connection, [piece]) for _ in range(3)] == [True] * 3
        lender.has = False
        ask(connection, some_labels(3))
        assert not take(connection, [piece])
    server.close()
    assert [sorted(loan.returned()) for loan in lender.loans] == [[0, 1, 2], [0, 1, 2], []]
    assert all(loan.is_over for loan in lender.loans)


def test_a_borrower_that_leaves_gives_everything_back(server: PeerServer, lender: Lender) -> None:
    connection = connected(server)
    greet(connection, OURS)
    ask(connection, some_labels(64))
    while not lender.loans:
        threading.Event().wait(0.001)
    connection.close()
    server.close()
    assert sorted(lender.loans[0].returned()) == list(range(64))
    assert not lender.loans[0].hand_over(Lent(1, ()))


def test_further_connections_are_closed_at_once(server: PeerServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_server, "MOST_CONNECTIONS", 3)
    held = [connected(server) for _ in range(3)]
    for connection in held:
        greet(connection, OURS)
    with connected(server) as one_more, pytest.raises(ConnectionError):
        greet(one_more, OURS)
    for connection in held:
        connection.close()


def test_connections_without_a_request_keep_no_other_shard_away(server: PeerServer) -> None:
    held = [connected(server) for _ in range(MOST_LOANS)]
    for connection in held:
        greet(connection, OURS)
    with connected(server) as one_more:
        greet(one_more, OURS)
        ask(one_more, some_labels(1))
        assert take(one_more, [memoryview(bytearray(8))])
    for connection in held:
        connection.close()


def test_a_request_beyond_the_most_loans_waits_and_is_given_up(
    lender: Lender, server: PeerServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_server, "MESSAGE_S", 0.2)
    for _ in range(MOST_LOANS):
        server._loans.acquire()
    with connected(server) as connection:
        greet(connection, OURS)
        ask(connection, some_labels(1))
        with pytest.raises(ConnectionError):
            take(connection, [memoryview(bytearray(8))])
    assert not lender.loans
    for _ in range(MOST_LOANS):
        server._loans.release()


def test_a_port_that_is_taken_is_an_error(server: PeerServer, lender: Lender) -> None:
    with pytest.raises(OSError, match="use"):
        PeerServer("127.0.0.1", server.port, OURS, lender, consider)


def test_a_loan_that_gets_no_block_ends_in_time() -> None:
    with pytest.raises(TimeoutError, match="engine gave no block"):
        Loan(some_labels(1)).next(0.01)


def test_an_offer_is_answered_block_by_block(server: PeerServer) -> None:
    blocks = [OfferedBlock(at - 1, 0.0, bytes(256)) for at in range(5)]
    with connected(server) as connection:
        greet(connection, OURS)
        assert offer(connection, Offer(":7", "acme", True, blocks)) == [True, False, True, False, True]
        ask(connection, some_labels(1))
        assert take(connection, [memoryview(bytearray(8))])


def test_an_offer_that_the_engine_does_not_finish_ends_with_its_connection(
    server: PeerServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_server, "OFFER_S", 0.05)
    monkeypatch.setattr(server, "_consider", lambda offer: OpenOffer(offer, []))
    with connected(server) as connection:
        greet(connection, OURS)
        with pytest.raises(ConnectionError):
            offer(connection, Offer(":7", "", True, [OfferedBlock(-1, 0.0, bytes(256))]))


def test_offers_beyond_the_most_wait_and_are_given_up(server: PeerServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_server, "OFFER_S", 0.05)
    for _ in range(peer_server.MOST_OFFERS):
        server._offers.acquire()
    with connected(server) as connection:
        greet(connection, OURS)
        with pytest.raises(ConnectionError):
            offer(connection, Offer(":7", "", True, [OfferedBlock(-1, 0.0, bytes(256))]))
    for _ in range(peer_server.MOST_OFFERS):
        server._offers.release()
