"""Offers of other shards that are about to stop: which of their blocks this one fetches. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Event

from shards.kv.arrivals import Arrivals
from shards.kv.peer_wire import Offer
from shards.kv.prefix import PrefixCache
from shards.kv.raw_block import BlockLabel, BlockLabels


@dataclass(eq=False, slots=True)
class OpenOffer:
    """An offer with the labels of its blocks. The engine's thread takes it, and a connection's thread waits.

    The blocks before `at` were looked at, and those before `landed` are not on their way any more.
    """

    offer: Offer
    labels: Sequence[BlockLabel]
    at: int = 0
    landed: int = 0
    _has: Sequence[bool] = ()
    _is_over: Event = field(default_factory=Event)

    def wait(self, timeout_s: float) -> Sequence[bool]:
        """For each block, whether it is cached here now. Raises TimeoutError."""
        if not self._is_over.wait(timeout_s):
            raise TimeoutError(f"the engine did not finish an offer within {timeout_s} s")
        return self._has

    def end(self, has: Sequence[bool]) -> None:
        """Wake the thread that waits."""
        self._has = has
        self._is_over.set()


class Offers:
    """Takes from each offer the blocks that are not cached here, parents first, as far as there is room for them.

    A block enters the host tier with the worth that it had at the other shard. At most `most` blocks come at once, so
    that prompts which fetch blocks find room for theirs. All but `ask` is called from the engine's thread.
    """

    def __init__(self, prefix: PrefixCache, arrivals: Arrivals, labels: BlockLabels, *, most: int) -> None:
        self._prefix, self._arrivals, self._labels, self._most = prefix, arrivals, labels, most
        self._asked: SimpleQueue[OpenOffer] = SimpleQueue()
        self._open: list[OpenOffer] = []
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<Offers: {len(self._open)} open>"

    @property
    def is_busy(self) -> bool:
        """Whether an offer is open."""
        return bool(self._open) or not self._asked.empty()

    def ask(self, offer: Offer) -> OpenOffer:
        """Consider `offer`; from any thread. The caller bounds their number."""
        labels: list[BlockLabel] = []
        for block in offer.blocks:
            labels.append(
                self._labels.first(block.token_ids, domain=offer.domain)
                if block.parent < 0
                else self._labels.after(labels[block.parent], block.token_ids)
            )
        opened = OpenOffer(offer, labels)
        self._asked.put(opened)
        if self._is_closed:
            opened.end([False] * len(labels))
        return opened

    def settle(self, now: float, fetch: Callable[[BlockLabel, str], None], may_ask: Callable[[str], bool]) -> None:
        """Call `fetch` with the label of each block that has a place from now on, and the address that has it.

        `now` is the pool's clock. Nothing more is taken from an address that `may_ask` denies.
        """
        for _ in range(self._asked.qsize()):
            self._open.append(self._asked.get())
        for opened in self._open:
            if may_ask(opened.offer.address):
                self._take(opened, now, fetch)
            else:
                opened.at = len(opened.labels)
        for opened in [each for each in self._open if self._is_done(each)]:
            self._open.remove(opened)
            opened.end([self._is_cached(label) for label in opened.labels])

    def close(self) -> None:
        """Take nothing any more."""
        self._is_closed = True
        self._open += [self._asked.get() for _ in range(self._asked.qsize())]
        for opened in self._open:
            opened.end([False] * len(opened.labels))

    def _take(self, opened: OpenOffer, now: float, fetch: Callable[[BlockLabel, str], None]) -> None:
        offer, labels = opened.offer, opened.labels
        while opened.at < len(labels) and len(self._arrivals) < self._most:
            label, block = labels[opened.at], offer.blocks[opened.at]
            opened.at += 1
            if self._is_here(label) or (block.parent >= 0 and not self._is_here(labels[block.parent])):
                continue
            worth = now - block.age
            if self._arrivals.open(
                label, domain=offer.domain, worth=worth, replaces=worth if offer.may_evict else -math.inf
            ):
                fetch(label, offer.address)

    def _is_here(self, label: BlockLabel) -> bool:
        return label.key in self._arrivals or self._is_cached(label)

    def _is_cached(self, label: BlockLabel) -> bool:
        cached = self._prefix.named(label.key)
        return cached is not None and self._labels.of(cached) == label

    def _is_done(self, opened: OpenOffer) -> bool:
        while opened.landed < opened.at and opened.labels[opened.landed].key not in self._arrivals:
            opened.landed += 1
        return opened.landed == len(opened.labels)
