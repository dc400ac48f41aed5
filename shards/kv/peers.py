"""The tier of other shards: blocks that are fetched from them instead of being computed. Torch-free."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

from shards.kv.arrivals import Arrivals
from shards.kv.host import HostTier
from shards.kv.keys import BLOCK_TOKENS
from shards.kv.offers import Offers, OpenOffer
from shards.kv.peer_jobs import Missing, PeerFetch, PeerWorker
from shards.kv.peer_wire import MOST_WANTED, Offer
from shards.kv.prefix import CachedBlock, PrefixCache
from shards.kv.raw_block import BlockLabel, BlockLabels, RawMemory
from shards.nouns import KvSource, PeerUse

_log = logging.getLogger(__name__)

_MOST_ARRIVING = 256
"""Blocks on their way at once, if half of the host slots are not fewer."""

_PER_FETCH = 8
"""Blocks of one fetch: several streams share a prompt."""

_PAUSE_S = 5.0
"""A peer that failed, or a block that it did not have, is not asked for again for so long."""

_MOST_PAUSES = 4096

_PRIOR_BYTES_PER_S = 1e9
"""Assumed rate before the first fetch: that of a link of 10 Gbit/s."""

_NEWEST = 0.2
"""Weight of the newest block in the measured time."""

_FADES = 0.02
"""Share of the measured time that becomes the assumed one again with each fetch that was not worth it."""


class KvPeers(NamedTuple):
    """What fetching needs: blocks with the labels of `labels` are brought into `memory` by `worker`."""

    worker: PeerWorker
    memory: RawMemory
    labels: BlockLabels
    clock: Callable[[], float]


class PeerTier:
    """Fetches blocks from other shards into the host tier, where they are cached as if computed: those of a prompt, and
    those that a shard offers before it stops.

    A peer that is dead, slow, or another one than expected means that the blocks are computed. Every call but `ask`
    comes from the engine's thread, and none waits. Without `peers` nothing is fetched.
    """

    def __init__(self, prefix: PrefixCache, host: HostTier, peers: KvPeers | None = None) -> None:
        self._peers, self._host = peers, host
        self._use = PeerUse()
        self._pauses: dict[tuple[str, int], float] = {}
        self._block_bytes = 0
        self._prior_s = self._block_s = self._moved_s = 0.0
        if peers is not None:
            most = min(_MOST_ARRIVING, host.size // 2)
            self._arrivals = Arrivals(prefix, host, peers.labels, most=most)
            self._block_bytes = sum(map(len, peers.memory.raw(0)))
            self._prior_s = self._block_s = self._block_bytes / _PRIOR_BYTES_PER_S
            self._offers = Offers(prefix, self._arrivals, peers.labels, most=max(1, most // 2))
            self._waiting: dict[int, str] = {}

    def __repr__(self) -> str:
        return f"<PeerTier {self._arrivals!r}>" if self.is_open else "<PeerTier closed>"

    @property
    def is_open(self) -> bool:
        """Whether blocks can be fetched."""
        return self._peers is not None

    @property
    def is_busy(self) -> bool:
        """Whether blocks are on their way, or offered."""
        return self._peers is not None and (bool(self._arrivals) or self._offers.is_busy)

    @property
    def has_offers(self) -> bool:
        """Whether blocks are offered."""
        return self._peers is not None and self._offers.is_busy

    def ask(self, offer: Offer) -> OpenOffer:
        """Consider `offer`; from any thread. The caller bounds their number."""
        assert self._peers is not None, "nothing can be fetched"
        return self._offers.ask(offer)

    @property
    def use(self) -> PeerUse | None:
        """Its work so far; None if nothing can be fetched."""
        return None if self._peers is None else self._use

    def find(
        self,
        path: Sequence[CachedBlock],
        tokens_of: Callable[[int], bytes],
        *,
        source: KvSource,
        limit: int,
        domain: str,
    ) -> list[BlockLabel]:
        """The labels of the blocks that continue `path` at `source`, up to `limit` blocks in total and 64 at a time."""
        found: list[BlockLabel] = []
        if self._peers is None or self._is_paused(source.address):
            return found
        labels = self._peers.labels
        last = min(limit, source.tokens // BLOCK_TOKENS, len(path) + MOST_WANTED)
        label = labels.of(path[-1]) if path and len(path) < last else None
        for at in range(len(path), last):
            tokens = tokens_of(at)
            label = labels.first(tokens, domain=domain) if label is None else labels.after(label, tokens)
            if self._is_paused(source.address, label.key):
                break
            found.append(label)
        return found

    def wait_s(self, labels: Sequence[BlockLabel]) -> float:
        """Predicted seconds until the blocks of `labels` are in the host tier.

        If that takes longer, it is the time for which none has come: a peer that hangs looks ever slower.
        """
        assert self._peers is not None, "nothing can be fetched"
        expected_s = (len(self._arrivals) + sum(label.key not in self._arrivals for label in labels)) * self._block_s
        return max(expected_s, self._peers.clock() - self._moved_s) if self._arrivals else expected_s

    def fetch(self, labels: Sequence[BlockLabel], source: KvSource, *, domain: str) -> bool:
        """Begin to fetch the blocks of `labels`, as far as there is room; False if not even the first is on its way."""
        assert self._peers is not None, "nothing can be fetched"
        if not self._arrivals:
            self._moved_s = self._peers.clock()
        opened = 0
        for label in labels:
            if label.key in self._arrivals:
                continue
            if self._arrivals.open(label, domain=domain) is None:
                break
            self._await(label, source.address)
            opened += 1
        if opened:
            self._use = self._use._replace(fetches=self._use.fetches + 1)
        self._begin()
        return bool(labels) and labels[0].key in self._arrivals

    def decline(self) -> None:
        """Note that computing was predicted to be faster: the measured time fades a little."""
        self._block_s += _FADES * (self._prior_s - self._block_s)

    def settle(self, now: float) -> None:
        """Take over what came since the last call, and begin the next fetches; `now` is the pool's clock."""
        if self._peers is None:
            return
        for outcome in self._peers.worker.outcomes():
            if outcome.error is None:
                # streams run beside each other: what counts is the time between two blocks
                took_s = max(0.0, outcome.ended_s - max(outcome.began_s, self._moved_s))
                self._block_s += _NEWEST * (took_s - self._block_s)
                self._moved_s = max(self._moved_s, outcome.ended_s)
                use = self._use
                if self._arrivals.land(outcome.key).worth is not None:
                    self._use = use._replace(taken_over=use.taken_over + 1)
                    continue
                self._use = use._replace(
                    blocks=use.blocks + 1,
                    received_bytes=use.received_bytes + self._block_bytes,
                    seconds=use.seconds + took_s,
                )
                continue
            self._arrivals.drop(outcome.key)
            self._use = self._use._replace(failed=self._use.failed + 1)
            if isinstance(outcome.error, Missing):
                self._pause(outcome.address, outcome.key)
            elif not self._is_paused(outcome.address):
                _log.warning("KV cannot be fetched from %s, and is computed: %s", outcome.address, outcome.error)
                self._pause(outcome.address)
        self._arrivals.admit(now)
        self._offers.settle(now, self._await, lambda address: not self._is_paused(address))
        self._begin()

    def clear(self, domain: str | None = None) -> None:
        """The blocks of `domain` that are on their way, or all, are not wanted any more."""
        if self._peers is not None:
            self._arrivals.void(domain)

    def close(self) -> None:
        """End the threads."""
        if self._peers is not None:
            self._offers.close()
            self._peers.worker.close()

    def check(self) -> None:
        """Assert that each block on its way holds its slot."""
        if self._peers is not None:
            self._arrivals.check()
            assert self._waiting.keys() <= {each.label.key for each in self._arrivals}, "a block waits for no slot"
            assert len(self._pauses) <= _MOST_PAUSES, "too many pauses"

    def _await(self, label: BlockLabel, address: str) -> None:
        self._waiting[label.key] = address

    def _begin(self) -> None:
        """Fetch blocks into slots that have become quiet."""
        assert self._peers is not None, "nothing can be fetched"
        by_address: dict[str, list[tuple[BlockLabel, Sequence[memoryview]]]] = {}
        for arrival in self._arrivals.begin():
            address = self._waiting.pop(arrival.label.key)
            wanted = by_address.setdefault(address, [])
            wanted.append((arrival.label, self._peers.memory.raw(arrival.slot)))
        for address, wanted in by_address.items():
            for first in range(0, len(wanted), _PER_FETCH):
                self._peers.worker.start(PeerFetch(address, tuple(wanted[first : first + _PER_FETCH])))

    def _pause(self, address: str, key: int = 0) -> None:
        assert self._peers is not None, "nothing can be fetched"
        now = self._peers.clock()
        if len(self._pauses) >= _MOST_PAUSES:
            self._pauses = {what: until_s for what, until_s in self._pauses.items() if until_s > now}
        if len(self._pauses) < _MOST_PAUSES:
            self._pauses[address, key] = now + _PAUSE_S

    def _is_paused(self, address: str, key: int = 0) -> bool:
        assert self._peers is not None, "nothing can be fetched"
        return self._pauses.get((address, key), 0.0) > self._peers.clock()
