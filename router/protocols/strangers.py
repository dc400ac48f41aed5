"""Requests without a known key, counted by the address of their client."""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Callable, Sequence
from functools import lru_cache
from urllib.parse import unquote

from http1.request import Request
from http1.seldom import Seldom
from http1.server import group_of
from policies.errors import Overloaded

BURST_S = 10
"""An address that was silent for so long may send as many requests at once."""

REST_S = 1.0
"""How long a refused client should wait, and nothing is read from its connection."""

MOST_ADDRESSES = 16_384
"""Addresses that are remembered; the one that was heard longest ago is forgotten."""

_LOG_EVERY_S = 10.0

_log = logging.getLogger("pointsman.http")


class Strangers:
    """A bucket of requests for each address: it fills at `per_second`, up to BURST_S seconds of it.

    `on_limit` hears of each request that is refused.
    """

    def __init__(self, clock: Callable[[], float], on_limit: Callable[[str], None] = lambda _: None) -> None:
        self._clock, self._on_limit = clock, on_limit
        self.levels: dict[str, tuple[float, float]] = {}
        """The level of each address that was counted, and since when it has it: changed here alone."""
        self._logged = Seldom(_LOG_EVERY_S, clock)

    def __repr__(self) -> str:
        return f"<Strangers at {len(self.levels)} addresses>"

    def count(self, address: str, per_second: int) -> None:
        """A request of `address` came without a known key."""
        level = self._level(address, per_second)
        self.levels.pop(address, None)
        self.levels[address] = (level - 1, self._clock())
        if len(self.levels) > MOST_ADDRESSES:
            del self.levels[next(iter(self.levels))]

    def is_over(self, address: str, per_second: int) -> bool:
        """Whether `address` has sent too many."""
        return address in self.levels and self._level(address, per_second) < 1

    def refusal(self, address: str) -> Overloaded:
        """The error for a request of `address`, which has sent too many; logged seldom."""
        self._on_limit("requests_of_address")
        if (count := self._logged.count("requests")) is not None:
            _log.warning(
                "refused %d requests without a known key, the last of %s: too many in a second", count, address
            )
        hint = "send the header 'Authorization: Bearer YOUR_KEY'"
        return Overloaded("too many requests without a known key", hint=hint, retry_after_s=REST_S)

    def _level(self, address: str, per_second: int) -> float:
        most = float(per_second * BURST_S)
        if (found := self.levels.get(address)) is None:
            return most
        level, at = found
        return min(most, level + (self._clock() - at) * per_second)


def address_of(request: Request, proxies: Sequence[str]) -> str:
    """The address of the client of `request`: of its connection, or behind `proxies` the last one in X-Forwarded-For
    that is none of them.
    """
    address = request.address
    if not proxies or not is_in(address, tuple(proxies)):
        return address
    for hop in reversed(request.headers.get("x-forwarded-for", "").split(",")):
        if (found := address_in(hop.strip())) is None:
            break
        address = found
        if not is_in(found, tuple(proxies)):
            break
    return address


def address_in(hop: str) -> str | None:
    """The address in an entry of X-Forwarded-For; None if it has none.

    Some load balancers write a port behind it: Azure's Application Gateway, and Amazon's if asked to.
    """
    if hop.startswith("["):
        hop = hop[1:].partition("]")[0]
    elif hop.count(":") == 1:
        hop = hop.partition(":")[0]
    try:
        return group_of((str(ipaddress.ip_address(hop)), 0))
    except ValueError:
        return None


def address_of_peer(peer: str) -> str:
    """The address in gRPC's name of a peer, `ipv4:192.0.2.1:5000` or `ipv6:%5B2001:db8::1%5D:5000`.

    Behind our own TLS that is a local socket: "", so all such clients count as one.
    """
    family, _, where = peer.partition(":")
    if family not in ("ipv4", "ipv6"):
        return ""
    host, _, _ = unquote(where).rpartition(":")
    return group_of((host.strip("[]"), 0))


@lru_cache(1024)
def is_in(address: str, networks: tuple[str, ...]) -> bool:
    """Whether `address`, or all of a network, is in one of `networks`."""
    try:
        own = ipaddress.ip_network(address)
    except ValueError:
        return False
    others = map(ipaddress.ip_network, networks)
    return any(isinstance(other, type(own)) and own.subnet_of(other) for other in others)  # type: ignore[arg-type]
