"""Peers: the running requests of other routers, until they are silent for too long."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from router.fleet.cluster.flights import Elsewhere, Traffic

MOST_PEERS = 256
"""Most names that count as routers."""


@dataclass(frozen=True, slots=True)
class _Peer:
    heard_at: float
    there: Mapping[str, Elsewhere] = field(default_factory=dict)


class Peers:
    """The other routers that sent something in the last `silent_s`."""

    def __init__(self, *, silent_s: float) -> None:
        self._silent_s = silent_s
        self._peers: dict[str, _Peer] = {}

    def __repr__(self) -> str:
        return f"<Peers {', '.join(sorted(self._peers)) or 'none'}>"

    def __len__(self) -> int:
        return len(self._peers)

    def hear(self, name: str, traffic: Mapping[str, Traffic] | None, at: float) -> None:
        """Router `name` reported at `at` its running requests at each backend; None: unchanged."""
        peer = self._peers.get(name)
        if peer is None and len(self._peers) >= MOST_PEERS:
            return
        before = peer.there if peer else {}
        if traffic is None:
            self._peers[name] = _Peer(at, before)
            return
        there = {backend: _changed(before.get(backend, Elsewhere()), now, at) for backend, now in traffic.items()}
        self._peers[name] = _Peer(at, there)

    def together(self, now: float) -> dict[str, Elsewhere]:
        """Their running requests at each backend. A router that was silent for too long counts with none."""
        self._peers = {name: peer for name, peer in self._peers.items() if now - peer.heard_at < self._silent_s}
        sums: dict[str, Elsewhere] = {}
        for peer in self._peers.values():
            for backend, there in peer.there.items():
                sums[backend] = sums[backend].plus(there) if backend in sums else there
        return sums


def _changed(before: Elsewhere, traffic: Traffic, at: float) -> Elsewhere:
    """The state at a backend after a router reports `traffic` at `at`; `before` was its state until then."""
    was = before.traffic
    # a prompt that joins others does not reset the backend's start
    goes_on = traffic.waiting_tokens == was.waiting_tokens or traffic.waiting > was.waiting > 0
    return Elsewhere(traffic, before.busy_since if goes_on else at)
