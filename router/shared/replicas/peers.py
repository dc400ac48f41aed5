"""Peers: what other routers have under way, until they fall silent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from router.fleet.cluster.flights import Traffic

MOST_PEERS = 256
"""More names than that are no routers."""


@dataclass(frozen=True, slots=True)
class _Peer:
    heard_at: float
    traffic: Mapping[str, Traffic] = field(default_factory=dict)


class Peers:
    """The other routers that were heard of in the last `silent_s`."""

    def __init__(self, *, silent_s: float) -> None:
        self._silent_s = silent_s
        self._peers: dict[str, _Peer] = {}

    def __repr__(self) -> str:
        return f"<Peers {', '.join(sorted(self._peers)) or 'none'}>"

    def __len__(self) -> int:
        return len(self._peers)

    def hear(self, name: str, traffic: Mapping[str, Traffic] | None, at: float) -> None:
        """Router `name` said at `at` what it has at each backend; None: as before."""
        peer = self._peers.get(name)
        if peer is None and len(self._peers) >= MOST_PEERS:
            return
        if traffic is None:
            traffic = peer.traffic if peer else {}
        self._peers[name] = _Peer(at, traffic)

    def together(self, now: float) -> dict[str, Traffic]:
        """What they have at each backend. Who was silent for too long has nothing there."""
        self._peers = {name: peer for name, peer in self._peers.items() if now - peer.heard_at < self._silent_s}
        sums: dict[str, Traffic] = {}
        for peer in self._peers.values():
            for backend, traffic in peer.traffic.items():
                sums[backend] = sums[backend].plus(traffic) if backend in sums else traffic
        return sums
