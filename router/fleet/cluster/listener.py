"""Listeners that hear what happens in a cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from backends.base import Backend, DraftedTokens, Fetched
from policies.learning.cost import Latency


class ClusterListener:
    """Hears what happens in a cluster, as it happens. This one heeds nothing: others say what they do.

    Backends are told by name. What is done must be cheap: requests wait for it.
    """

    def reached(self, backend: Backend) -> None:
        """`backend` said for the first time what it serves."""

    def gone(self, backend: str) -> None:
        """It was removed, and closed."""

    def health(self, backend: str, healthy: bool) -> None:
        """It may get requests now, or no longer."""

    def computed(self, backend: str, keys: Sequence[int]) -> None:
        """It has computed the long prompt with blocks `keys`, for which other requests may wait."""

    def used(self, backend: str, count: Callable[[], int]) -> None:
        """It has its first request; `count` says how many this router has there at any time."""

    def predicted(self, backend: str, predicted_s: float, seen_s: float) -> None:
        """A first token took `seen_s`; when its request was sent, `predicted_s` were expected."""

    def learnt(self, backend: str, latency: Latency, adaptive_limit: int | None) -> None:
        """What is known of its speed by now; None: it tells itself how many requests it takes."""

    def drafted(self, backend: str, drafts: Mapping[str, DraftedTokens]) -> None:
        """The tokens that were guessed there and verified since its start, by what guessed them."""

    def uncaptured(self, backend: str, steps: int) -> None:
        """Decoding steps that it computed without a CUDA graph, since a capture failed."""

    def on_disk(self, backend: str, blocks: Mapping[str, int]) -> None:
        """The `blocks` of its directory for KV, by what became of them."""

    def fetched(self, backend: str, fetched: Fetched) -> None:
        """The KV that it has fetched from others since its start."""


class Listeners(ClusterListener):
    """Tells all that listen, in the order in which they began to."""

    def __init__(self) -> None:
        self._all: list[ClusterListener] = []

    def add(self, listener: ClusterListener) -> None:
        """Let `listener` hear what happens from now on."""
        self._all.append(listener)

    def reached(self, backend: Backend) -> None:
        for listener in self._all:
            listener.reached(backend)

    def gone(self, backend: str) -> None:
        for listener in self._all:
            listener.gone(backend)

    def health(self, backend: str, healthy: bool) -> None:
        for listener in self._all:
            listener.health(backend, healthy)

    def computed(self, backend: str, keys: Sequence[int]) -> None:
        for listener in self._all:
            listener.computed(backend, keys)

    def used(self, backend: str, count: Callable[[], int]) -> None:
        for listener in self._all:
            listener.used(backend, count)

    def predicted(self, backend: str, predicted_s: float, seen_s: float) -> None:
        for listener in self._all:
            listener.predicted(backend, predicted_s, seen_s)

    def learnt(self, backend: str, latency: Latency, adaptive_limit: int | None) -> None:
        for listener in self._all:
            listener.learnt(backend, latency, adaptive_limit)

    def drafted(self, backend: str, drafts: Mapping[str, DraftedTokens]) -> None:
        for listener in self._all:
            listener.drafted(backend, drafts)

    def uncaptured(self, backend: str, steps: int) -> None:
        for listener in self._all:
            listener.uncaptured(backend, steps)

    def on_disk(self, backend: str, blocks: Mapping[str, int]) -> None:
        for listener in self._all:
            listener.on_disk(backend, blocks)

    def fetched(self, backend: str, fetched: Fetched) -> None:
        for listener in self._all:
            listener.fetched(backend, fetched)
