"""The work of fetching blocks from other shards, on threads of its own. Torch-free."""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Thread
from typing import NamedTuple, Protocol

from shards.kv.peer_identity import PeerIdentity
from shards.kv.peer_wire import ask, greet, take
from shards.kv.raw_block import BlockLabel
from shards.kv.timed_socket import TimedSocket

STREAMS = 4
"""Threads that fetch, each with a connection of its own to each peer."""

CONNECT_S, BLOCK_S = 1.0, 5.0
"""A peer is given up if it takes so long to connect, or for the handshake or one block."""


class Missing(Exception):
    """The peer does not have the block."""


@dataclass(frozen=True, slots=True, eq=False)
class PeerFetch:
    """Fetch `wanted` blocks, each into its pieces, from the shard at `address` (host:port)."""

    address: str
    wanted: Sequence[tuple[BlockLabel, Sequence[memoryview]]]


class PeerOutcome(NamedTuple):
    """The end of the block `key` from `address`, at `ended_s`; it `began_s`. `error` is None if its bytes are there."""

    address: str
    key: int
    error: Exception | None
    began_s: float
    ended_s: float


class PeerWorker(Protocol):
    """Fetches blocks beside each other."""

    def start(self, job: PeerFetch) -> None:
        """Begin `job`. Each of its blocks gets one outcome. The caller bounds the number of unfinished blocks."""
        ...

    def outcomes(self) -> list[PeerOutcome]:
        """The outcomes since the last call."""
        ...

    def close(self) -> None:
        """End the threads; nothing may be started afterwards, and nothing writes any more when this returns."""
        ...


def connect(address: str) -> TimedSocket:
    """A connection to the shard at `address` (host:port), before any handshake. Raises OSError, ValueError."""
    host, _, port = address.rpartition(":")
    return TimedSocket(socket.create_connection((host.strip("[]"), int(port)), CONNECT_S))


def introduce(connection: TimedSocket, identity: PeerIdentity) -> None:
    """Begin `connection` as the end that connected, with `identity`. Raises PeerRefused, OSError."""
    if identity.tls is not None:
        connection.secure(identity.tls.connect)
    greet(connection, identity)


class PeerThreads:
    """A `PeerWorker` with `streams` threads. Each proves this shard's `identity` to the peer."""

    def __init__(
        self, identity: PeerIdentity, *, streams: int = STREAMS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._identity, self._clock = identity, clock
        self._jobs: SimpleQueue[PeerFetch | None] = SimpleQueue()
        self._done: deque[PeerOutcome] = deque()
        self._open: set[TimedSocket] = set()
        self._is_closing = False
        self._threads = [Thread(target=self._run, name=f"kv-peer-{number}", daemon=True) for number in range(streams)]
        for thread in self._threads:
            thread.start()

    def __repr__(self) -> str:
        return f"<PeerThreads: {self._jobs.qsize()} fetches wait, {len(self._open)} connections>"

    def start(self, job: PeerFetch) -> None:
        """Queue `job`."""
        self._jobs.put(job)

    def outcomes(self) -> list[PeerOutcome]:
        """The outcomes since the last call."""
        return [self._done.popleft() for _ in range(len(self._done))]

    def close(self) -> None:
        """Break connections off and end the threads."""
        self._is_closing = True
        for connection in list(self._open):
            with suppress(OSError):
                connection.shutdown()
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        connections: dict[str, TimedSocket] = {}
        while (job := self._jobs.get()) is not None:
            self._fetch(job, connections)
        for connection in connections.values():
            connection.close()

    def _fetch(self, job: PeerFetch, connections: dict[str, TimedSocket]) -> None:
        """Fetch the blocks of `job`, on a connection that is kept for the next one if nothing went wrong."""
        at, began_s = 0, self._clock()
        error: Exception = Missing("the peer does not have it")
        try:
            connection = self._connection(job.address, connections)
            try:
                connection.within(BLOCK_S)
                ask(connection, [label for label, _ in job.wanted])
                for label, pieces in job.wanted:
                    connection.within(BLOCK_S)
                    if not take(connection, pieces):
                        break
                    at, began_s = at + 1, self._tell(job.address, label.key, None, began_s)
            except BaseException:
                self._drop(connection)
                raise
            connections[job.address] = connection
        except Exception as failure:  # noqa: BLE001 - every exception of a job is the business of the tier that started it
            error = failure
        for label, _ in job.wanted[at:]:
            self._tell(job.address, label.key, error, began_s)

    def _connection(self, address: str, connections: dict[str, TimedSocket]) -> TimedSocket:
        """That of the last fetch, unless the peer has closed it; else a new one."""
        connection = connections.pop(address, None)
        if connection is None:
            return self._connect(address)
        if connection.is_quiet():
            return connection
        self._drop(connection)
        return self._connect(address)

    def _drop(self, connection: TimedSocket) -> None:
        self._open.discard(connection)
        connection.close()

    def _connect(self, address: str) -> TimedSocket:
        if self._is_closing:
            raise ConnectionError("this shard stops")
        connection = connect(address)
        self._open.add(connection)
        try:
            connection.within(BLOCK_S)
            introduce(connection, self._identity)
        except BaseException:
            self._drop(connection)
            raise
        return connection

    def _tell(self, address: str, key: int, error: Exception | None, began_s: float) -> float:
        """Note an outcome; returns the time."""
        now = self._clock()
        self._done.append(PeerOutcome(address, key, error, began_s, now))
        return now
