from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress

import pytest

from shards.kv import peer_jobs
from shards.kv.keys import BLOCK_TOKENS, TOKEN_BYTES
from shards.kv.peer_identity import PeerIdentity
from shards.kv.peer_jobs import PeerFetch, PeerOutcome, PeerThreads
from shards.kv.peer_wire import next_request, welcome
from shards.kv.raw_block import BlockLabels
from shards.kv.timed_socket import TimedSocket

IDENTITY = PeerIdentity(bytes(32), b"of the shards")
LABEL = BlockLabels("m", bytes(32)).first(bytes(BLOCK_TOKENS * TOKEN_BYTES), domain="")
LIMIT_S = 10.0


def outcome_of(threads: PeerThreads) -> PeerOutcome:
    until_s = time.monotonic() + LIMIT_S
    while not (outcomes := threads.outcomes()):
        assert time.monotonic() < until_s, "the fetch does not end"
        time.sleep(0.001)
    (outcome,) = outcomes
    return outcome


@pytest.mark.parametrize("proves", [True, False], ids=["block", "handshake"])
def test_a_peer_that_sends_byte_by_byte_is_given_up_after_the_time_of_one_block(
    proves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_jobs, "BLOCK_S", 0.2)
    is_over = threading.Event()

    def trickle(listener: socket.socket) -> None:
        with TimedSocket(listener.accept()[0]) as connection, suppress(OSError):
            if proves:
                welcome(connection, IDENTITY)
                next_request(connection, IDENTITY.fingerprint)
            while not is_over.wait(0.02):
                connection.sendall(b"\x01")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        sender = threading.Thread(target=trickle, args=(listener,))
        sender.start()
        threads = PeerThreads(IDENTITY, streams=1)
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        threads.start(PeerFetch(address, ((LABEL, (memoryview(bytearray(1 << 20)),)),)))
        outcome = outcome_of(threads)
        is_over.set()
        sender.join()
        threads.close()
    assert isinstance(outcome.error, TimeoutError)
    assert outcome.ended_s - outcome.began_s < LIMIT_S
