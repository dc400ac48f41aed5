"""Blocks on their way from outside into the host tier. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from shards.kv.adapter_domain import tenant_domain
from shards.kv.host import HostTier
from shards.kv.prefix import CachedBlock, PrefixCache
from shards.kv.raw_block import BlockLabel, BlockLabels


@dataclass(slots=True, eq=False)
class Arriving:
    """The block of `label` on its way into host slot `slot`, which is held. `is_begun` once the slot is quiet.

    It will have the `worth` that it comes with; None: that of a block that is used now. It `is_void` if its domain was
    cleared meanwhile.
    """

    label: BlockLabel
    domain: str
    slot: int
    worth: float | None = None
    is_begun: bool = False
    has_landed: bool = False
    is_void: bool = False


class Arrivals:
    """At most `most` blocks that are brought into held host slots, and become cached blocks of the host tier.

    Domain, prefix and tokens are compared exactly, by the label. Every call comes from the engine's thread.
    """

    def __init__(self, prefix: PrefixCache, host: HostTier, labels: BlockLabels, *, most: int) -> None:
        self._prefix, self._host, self._labels, self._most = prefix, host, labels, most
        self._open: dict[int, Arriving] = {}

    def __repr__(self) -> str:
        return f"<Arrivals: {len(self._open)} of {self._most}>"

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[Arriving]:
        return iter(list(self._open.values()))

    def __contains__(self, key: int) -> bool:
        return key in self._open

    def open(
        self, label: BlockLabel, *, domain: str, worth: float | None = None, replaces: float = math.inf
    ) -> Arriving | None:
        """A place for the block of `label`, if needed that of a block worth less than `replaces`; None without one."""
        assert label.key not in self._open, "a block is brought twice"
        slot = self._host.take(replaces) if len(self._open) < self._most else None
        if slot is None:
            return None
        arrival = self._open[label.key] = Arriving(label, domain, slot, worth)
        return arrival

    def begin(self) -> list[Arriving]:
        """Those with a slot that has become quiet: their bytes may be written from now on."""
        quiet = [each for each in self._open.values() if not each.is_begun]
        quiet = [each for each in quiet if not self._host.flights.is_slot_busy(each.slot)]
        for arrival in quiet:
            arrival.is_begun = True
        return quiet

    def land(self, key: int) -> Arriving:
        """The bytes of the block are in its slot."""
        arrival = self._open[key]
        arrival.has_landed = True
        return arrival

    def drop(self, key: int) -> None:
        """The block does not come; nothing may write into its slot any more."""
        self._host.release(self._open.pop(key).slot)

    def void(self, domain: str | None = None) -> None:
        """The blocks of `domain`, or all, are not wanted any more."""
        for arrival in self._open.values():
            arrival.is_void = arrival.is_void or domain in (None, tenant_domain(arrival.domain))

    def admit(self, now: float) -> int:
        """Let landed blocks into the host tier, parents first; those without a cached parent are dropped.

        Returns the number of new cached blocks; their worth is `now` if they came without any.
        """
        admitted = 0
        landed = [arrival for arrival in self._open.values() if arrival.has_landed]
        for arrival in sorted(landed, key=lambda each: each.label.depth):
            if arrival.label.depth and arrival.label.parent in self._open:
                # its parent is still on its way
                continue
            cached = self._cached_as(arrival)
            if cached is not None:
                admitted += 1
                cached.chain, cached.worth = arrival.label.chain, now if arrival.worth is None else arrival.worth
                self._host.enter(cached, arrival.slot)
            self.drop(arrival.label.key)
            if cached is not None and cached.parent is not None:
                # it was a leaf of the host tier until now
                self._host.settle(cached.parent)
        return admitted

    def check(self) -> None:
        """Assert that each arrival holds its slot."""
        assert len(self._open) <= self._most, "too many blocks are on their way"
        assert all(self._host.is_held(each.slot) for each in self._open.values()), "a slot is written, not held"

    def _cached_as(self, arrival: Arriving) -> CachedBlock | None:
        """The new cached block; None if its parent is gone or the block is cached again already."""
        label, parent = arrival.label, None
        if arrival.is_void:
            return None
        if label.depth:
            parent = self._prefix.named(label.parent, domain=arrival.domain)
            if parent is None or self._labels.after(self._labels.of(parent), label.token_ids) != label:
                return None
        return self._prefix.admit(parent, label.token_ids, domain=arrival.domain)
