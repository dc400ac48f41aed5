"""The port at which other shards fetch blocks from this one. Torch-free."""

from __future__ import annotations

import logging
import socket
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing, suppress

from shards.kv.lending import MOST_LOANS, Loan
from shards.kv.offers import OpenOffer
from shards.kv.peer_identity import PeerIdentity, PeerTls
from shards.kv.peer_wire import Offer, PeerRefused, give, next_request, reply, welcome
from shards.kv.raw_block import BlockLabel
from shards.kv.timed_socket import TimedSocket
from tls.refusals import Refusals

_log = logging.getLogger(__name__)

MOST_CONNECTIONS = 256
"""Connections at once: those of 64 shards with four streams each."""

MOST_UNPROVEN = 32
"""Connections of one address that have not finished their handshake: strangers leave room for shards elsewhere."""

MESSAGE_S = 10.0
"""A connection is closed if one message or block takes so long, or the engine to hand over a block."""

IDLE_S = 60.0
"""A connection without a request is closed after so long."""

OFFER_S = 60.0
"""An offer that the engine has not finished after so long ends with its connection."""

MOST_OFFERS = 4
"""Offers at once; the next one waits."""


class PeerServer:
    """Listens on `host` and `port` (0: any) and sends the blocks that `lend` hands over, on a thread per connection.

    `lend` makes a loan and wakes the engine, `consider` does so with an offer. More than MOST_CONNECTIONS at a time are
    refused, and more than MOST_UNPROVEN handshakes of one address. Beyond MOST_LOANS requests or MOST_OFFERS offers the
    next one waits. Raises OSError.
    """

    def __init__(
        self,
        host: str,
        port: int,
        identity: PeerIdentity,
        lend: Callable[[Sequence[BlockLabel]], Loan],
        consider: Callable[[Offer], OpenOffer],
    ) -> None:
        self._identity, self._lend, self._consider = identity, lend, consider
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=MOST_CONNECTIONS)
        self._connections: dict[TimedSocket, threading.Thread] = {}
        self._unproven: Counter[str] = Counter()
        self._refusals = Refusals("the port for KV", lack="no exchange of KV")
        self._loans = threading.BoundedSemaphore(MOST_LOANS)
        self._offers = threading.BoundedSemaphore(MOST_OFFERS)
        self._lock, self._is_closing = threading.Lock(), False
        self._thread = threading.Thread(target=self._accept, name="kv-lend", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"<PeerServer at port {self.port}: {len(self._connections)} connections>"

    @property
    def fingerprint(self) -> bytes:
        """Of the KV that it lends."""
        return self._identity.fingerprint

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return int(self._listener.getsockname()[1])

    def close(self) -> None:
        """Break all connections off and end the threads."""
        self._is_closing = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()
        with self._lock:
            connections = dict(self._connections)
        for connection in connections:
            with suppress(OSError):
                connection.shutdown()
        for thread in connections.values():
            thread.join()

    def _accept(self) -> None:
        while not self._is_closing:
            try:
                accepted, place = self._listener.accept()
            except OSError:
                # it was closed, or there are no descriptors: then the next try waits for a moment
                threading.Event().wait(0.0 if self._is_closing else 0.1)
                continue
            with self._lock:
                peer, is_full = str(place[0]), len(self._connections) >= MOST_CONNECTIONS
                if is_full or self._unproven[peer] >= MOST_UNPROVEN or self._is_closing:
                    accepted.close()
                    continue
                connection = TimedSocket(accepted)
                thread = threading.Thread(target=self._serve, args=(connection, peer), name="kv-lend", daemon=True)
                self._connections[connection] = thread
                self._unproven[peer] += 1
            thread.start()

    def _serve(self, connection: TimedSocket, peer: str) -> None:
        try:
            with closing(connection):
                self._welcome(connection, peer)
                while (request := self._next(connection)) is not None:
                    if isinstance(request, Offer):
                        self._take(connection, request)
                    else:
                        self._send(connection, request)
        except PeerRefused as refusal:
            self._refusals.refuse(peer, refusal)
        except OSError as error:
            if not self._is_closing:
                _log.info("a connection for KV ended: %s", error)
        finally:
            with self._lock:
                del self._connections[connection]

    def _welcome(self, connection: TimedSocket, peer: str) -> None:
        """Have the other end, at the address `peer`, prove that it is a shard. Raises PeerRefused, OSError."""
        tls = self._identity.tls
        connection.within(MESSAGE_S)
        try:
            if tls is not None:
                self._secure(connection, peer, tls)
            welcome(connection, self._identity)
        finally:
            with self._lock:
                self._unproven[peer] -= 1
                if not self._unproven[peer]:
                    del self._unproven[peer]

    def _secure(self, connection: TimedSocket, peer: str, tls: PeerTls) -> None:
        try:
            connection.secure(tls.accept)
        except OSError as error:
            tls.server.refusals.refuse(peer, error)
            raise

    def _next(self, connection: TimedSocket) -> Sequence[BlockLabel] | Offer | None:
        connection.within(IDLE_S)
        return next_request(connection, self._identity.fingerprint, on_begin=lambda: connection.within(MESSAGE_S))

    def _take(self, connection: TimedSocket, offer: Offer) -> None:
        host, _, port = offer.address.rpartition(":")
        if not host:
            host = connection.peer
            host = f"[{host}]" if ":" in host else host
        if not self._offers.acquire(timeout=OFFER_S):
            raise TimeoutError(f"{MOST_OFFERS} other offers were not done within {OFFER_S} s")
        try:
            has = self._consider(offer._replace(address=f"{host}:{port}")).wait(OFFER_S)
        finally:
            self._offers.release()
        connection.within(MESSAGE_S)
        reply(connection, has)

    def _send(self, connection: TimedSocket, labels: Sequence[BlockLabel]) -> None:
        if not self._loans.acquire(timeout=MESSAGE_S):
            raise TimeoutError(f"{MOST_LOANS} other requests were not done within {MESSAGE_S} s")
        loan = self._lend(labels)
        try:
            for _ in labels:
                lent = loan.next(MESSAGE_S)
                connection.within(MESSAGE_S)
                if lent is None:
                    give(connection, None)
                    return
                try:
                    give(connection, lent.pieces)
                finally:
                    loan.give_back(lent)
        finally:
            loan.end()
            self._loans.release()
