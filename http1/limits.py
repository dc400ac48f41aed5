"""Bounds, in bytes and seconds: nothing that another program sends is waited for, or kept, without one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Of each connection of a client, and of how many there are.

    Strangers are clients before a handler has vouched for one of their requests. `strangers` is how many of their
    connections may wait at one address (None: any number); those at an address that `is_exempt` are not counted, such
    as the address of a load balancer. Above a limit, the connection that has waited longest is closed.

    `waiting` is how many requests a client may send ahead on one connection; `unread_bytes` is how much of a body may
    wait for its handler. `head_s` is for a whole head; the other times are for silences: `body_s` within a body,
    `idle_s` between requests, `write_s` of a client that does not read. A client that has closed its side has most
    often gone: its handler may go on for `half_closed_s`. A client that still sends what is dropped may do so for
    `linger_s` before its connection is closed.
    """

    connections: int = 16_384
    strangers: int | None = 512
    is_exempt: Callable[[str], bool] = lambda _: False
    head_bytes: int = 64 << 10
    headers: int = 128
    body_bytes: int = 64 << 20
    unread_bytes: int = 256 << 10
    waiting: int = 32
    head_s: float = 30.0
    body_s: float = 60.0
    idle_s: float = 75.0
    write_s: float = 60.0
    half_closed_s: float = 0.25
    linger_s: float = 2.0


@dataclass(frozen=True, slots=True)
class ClientLimits:
    """Of a client of one server.

    `silence_s` is the longest time that a reader waits for the next bytes of an answer, its head included. `idle_s` is
    how long a connection is kept that is not used, `most_idle` how many; `connections` is how many there may be in all:
    one more is refused, and does not wait. With `decoded_bytes` the server is asked to compress, and its answers are
    decoded, to at most so many bytes.
    """

    connect_s: float = 5.0
    silence_s: float = 600.0
    idle_s: float = 15.0
    most_idle: int = 1024
    connections: int = 16_384
    head_bytes: int = 64 << 10
    headers: int = 256
    unread_bytes: int = 256 << 10
    decoded_bytes: int | None = None
