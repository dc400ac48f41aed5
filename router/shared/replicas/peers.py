"""Peers: the running requests of other routers, until they are silent for too long."""

from __future__ import annotations

from collections.abc import Mapping

from router.fleet.cluster.flights import Elsewhere, Traffic

_NOTHING = Elsewhere()

_REMEMBERED = 8
"""How many times as long as it may be silent a router's requests are remembered."""

MOST_PEERS = 256
"""Most names that count as routers."""


class Peers:
    """The other routers that sent something in the last `silent_s`.

    A message changes the requests at few backends, and only those are added up again, however many there are. The
    requests of a silent router do not count, but are remembered for a while: if it was this router that was held up,
    the next message has only changes.
    """

    def __init__(self, *, silent_s: float) -> None:
        self._silent_s = silent_s
        self._heard_at: dict[str, float] = {}
        self._backends: dict[str, set[str]] = {}  # of each router
        self._there: dict[str, dict[str, Elsewhere]] = {}  # at each backend, of each router
        self._changed: set[str] = set()
        # of silent routers: since when, and their last known requests
        self._silent: dict[str, tuple[float, dict[str, Elsewhere]]] = {}

    def __repr__(self) -> str:
        return f"<Peers {', '.join(sorted(self._heard_at)) or 'none'}>"

    def __len__(self) -> int:
        return len(self._heard_at)

    def hear(self, name: str, traffic: Mapping[str, Traffic] | None, changes: Mapping[str, Traffic], at: float) -> None:
        """Router `name` reported at `at` its running requests at each backend (None: not all), then `changes`."""
        if name not in self._heard_at and len(self._heard_at) >= MOST_PEERS:
            return
        self._heard_at[name] = at
        _, remembered = self._silent.pop(name, (at, {}))
        for backend, before in remembered.items():
            self._there.setdefault(backend, {})[name] = before
            self._backends.setdefault(name, set()).add(backend)
            self._changed.add(backend)
        if traffic is not None:
            for backend in self._backends.get(name, set()) - traffic.keys():
                self._set(name, backend, Traffic(), at)
            for backend, there in traffic.items():
                self._set(name, backend, there, at)
        for backend, there in changes.items():
            self._set(name, backend, there, at)

    def forget_silent(self, now: float) -> None:
        """Count routers without requests that were silent for too long, for a reader that has read all messages."""
        for name in [name for name, heard_at in self._heard_at.items() if now - heard_at >= self._silent_s]:
            backends = self._backends.pop(name, set())
            self._silent[name] = now, {backend: self._there[backend][name] for backend in backends}
            for backend in backends:
                self._set(name, backend, _NOTHING.traffic, now)
            del self._heard_at[name]
        remembered_s = _REMEMBERED * self._silent_s
        self._silent = {name: each for name, each in self._silent.items() if now - each[0] < remembered_s}

    def changed(self) -> dict[str, Elsewhere]:
        """All routers' requests at the backends where that may have changed since the last call."""
        changed, self._changed = self._changed, set()
        return {backend: self._sum(backend) for backend in changed}

    def check(self) -> None:
        """Assert that both maps agree."""
        pairs = {(name, backend) for name, backends in self._backends.items() for backend in backends}
        assert pairs == {(name, backend) for backend, there in self._there.items() for name in there}
        assert {name for name, _ in pairs} <= self._heard_at.keys(), f"{self!r} knows requests of a silent router"

    def _set(self, name: str, backend: str, traffic: Traffic, at: float) -> None:
        there = self._there.setdefault(backend, {})
        if traffic == _NOTHING.traffic:
            there.pop(name, None)
            self._backends.get(name, set()).discard(backend)
            if not there:
                del self._there[backend]
        else:
            there[name] = _changed(there.get(name, _NOTHING), traffic, at)
            self._backends.setdefault(name, set()).add(backend)
        self._changed.add(backend)

    def _sum(self, backend: str) -> Elsewhere:
        there = self._there.get(backend)
        if there is None:
            return _NOTHING
        if len(there) == 1:
            (only,) = there.values()
            return only
        # a column at a time: half the time of adding up records
        running, waiting, tokens, pairs = map(sum, zip(*(each.traffic for each in there.values()), strict=True))
        return Elsewhere(Traffic(running, waiting, tokens, pairs), max(each.busy_since for each in there.values()))


def _changed(before: Elsewhere, traffic: Traffic, at: float) -> Elsewhere:
    """The state at a backend after a router reports `traffic` at `at`; `before` was its state until then."""
    was = before.traffic
    # a prompt that joins others does not reset the backend's start
    goes_on = traffic.waiting_tokens == was.waiting_tokens or traffic.waiting > was.waiting > 0
    return Elsewhere(traffic, before.busy_since if goes_on else at)
