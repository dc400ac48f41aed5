"""Requests without a known key, counted by the address of their client."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Sequence
from functools import lru_cache

from http1.request import Request
from http1.waiting import group_of

BURST_S = 10
"""An address that was silent for so long may send as many requests at once."""

MOST_ADDRESSES = 16_384
"""Addresses that are remembered; the one that was heard longest ago is forgotten."""


class Strangers:
    """A bucket of requests for each address: it fills at `per_second`, up to BURST_S seconds of it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._levels: dict[str, tuple[float, float]] = {}

    def __repr__(self) -> str:
        return f"<Strangers at {len(self._levels)} addresses>"

    def count(self, address: str, per_second: int) -> None:
        """A request of `address` came without a known key."""
        level = self._level(address, per_second)
        self._levels.pop(address, None)
        self._levels[address] = (level - 1, self._clock())
        if len(self._levels) > MOST_ADDRESSES:
            del self._levels[next(iter(self._levels))]

    def is_over(self, address: str, per_second: int) -> bool:
        """Whether `address` has sent too many."""
        return address in self._levels and self._level(address, per_second) < 1

    def _level(self, address: str, per_second: int) -> float:
        most = float(per_second * BURST_S)
        if (found := self._levels.get(address)) is None:
            return most
        level, at = found
        return min(most, level + (self._clock() - at) * per_second)


def address_of(request: Request, proxies: Sequence[str]) -> str:
    """The address of the client of `request`: of its connection, or behind `proxies` the last one in X-Forwarded-For
    that is none of them.
    """
    address = group_of(request.peer)
    if not proxies or not is_in(address, tuple(proxies)):
        return address
    for hop in reversed(request.headers.get("x-forwarded-for", "").split(",")):
        try:
            found = group_of((str(ipaddress.ip_address(hop.strip())), 0))
        except ValueError:
            break
        address = found
        if not is_in(found, tuple(proxies)):
            break
    return address


@lru_cache(1024)
def is_in(address: str, networks: tuple[str, ...]) -> bool:
    """Whether `address`, or all of a network, is in one of `networks`."""
    try:
        own = ipaddress.ip_network(address)
    except ValueError:
        return False
    others = map(ipaddress.ip_network, networks)
    return any(isinstance(other, type(own)) and own.subnet_of(other) for other in others)  # type: ignore[arg-type]
