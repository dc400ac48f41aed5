"""The connections on which the server waits for the client: which one is closed first when there are too many."""

from __future__ import annotations

import ipaddress
from typing import Generic, Protocol, TypeVar


class Connection(Protocol):
    """A connection of a client at `address`. It `is_known` once a handler has vouched for one of its requests."""

    address: str
    is_known: bool


C = TypeVar("C", bound=Connection)


class WaitingClients(Generic[C]):
    """Connections without a running handler: new ones, those with an unfinished head, idle ones; oldest first.

    Those of strangers, which are not known, are counted by address.
    """

    def __init__(self) -> None:
        self._known: dict[C, None] = {}
        self._strangers: dict[C, None] = {}
        self._by_address: dict[str, dict[C, None]] = {}

    def __repr__(self) -> str:
        return f"<WaitingClients {len(self._strangers)} strangers, {len(self._known)} known>"

    def __len__(self) -> int:
        return len(self._known) + len(self._strangers)

    def add(self, connection: C) -> None:
        """The server waits for this client from now on."""
        if connection.is_known:
            self._known[connection] = None
        else:
            self._strangers[connection] = None
            self._by_address.setdefault(connection.address, {})[connection] = None

    def discard(self, connection: C) -> None:
        """The client has begun a request, or has gone."""
        if connection in self._strangers:
            del self._strangers[connection]
            own = self._by_address[connection.address]
            del own[connection]
            if not own:
                del self._by_address[connection.address]
        else:
            self._known.pop(connection, None)

    def strangers_at(self, address: str) -> int:
        """How many strangers wait at `address`."""
        return len(self._by_address.get(address, ()))

    def oldest_at(self, address: str) -> C:
        """The stranger that has waited longest at `address`. Raises KeyError if there is none."""
        return next(iter(self._by_address[address]))

    def oldest(self) -> C | None:
        """The connection that is missed least: the oldest stranger, else the oldest known one."""
        return next(iter(self._strangers or self._known), None)


def group_of(peer: object) -> str:
    """The address in a client's socket name, as its connections are counted: an IPv6 network of 64 bits is one."""
    host = peer[0] if isinstance(peer, tuple) and peer else ""
    if not isinstance(host, str) or ":" not in host:
        return host if isinstance(host, str) else ""
    address = ipaddress.IPv6Address(host.partition("%")[0])
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(address) >> 64 << 64, 64)))
