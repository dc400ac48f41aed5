"""A shard that is about to stop offers its cached blocks to others, which fetch them. Torch-free."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from threading import Condition, Thread
from typing import NamedTuple

from shards.kv.peer_identity import PeerIdentity
from shards.kv.peer_jobs import connect, introduce
from shards.kv.peer_wire import MOST_OFFERED, Offer, OfferedBlock, PeerRefused, offer
from shards.kv.prefix import CachedBlock
from shards.kv.timed_socket import TimedSocket

_log = logging.getLogger(__name__)

MOST_HEIRS = 8
"""Shards that one shard offers its blocks to."""

_BATCH_BLOCKS = 256
"""Prompts are offered together up to so many blocks: an offer takes the other shard two steps at least."""


class Batch(NamedTuple):
    """Blocks of the cache domain `domain`, parents first."""

    domain: str
    blocks: Sequence[OfferedBlock]

    def without(self, has: Sequence[bool]) -> Batch:
        """The blocks that `has` denies, and those in front of them."""
        is_kept = [not each for each in has]
        for at in range(len(is_kept) - 1, -1, -1):
            if is_kept[at] and self.blocks[at].parent >= 0:
                is_kept[self.blocks[at].parent] = True
        kept = [at for at, each in enumerate(is_kept) if each]
        places = {at: place for place, at in enumerate(kept)}
        blocks = (self.blocks[at] for at in kept)
        return Batch(self.domain, [each._replace(parent=places.get(each.parent, -1)) for each in blocks])


def batches_of(worth: Mapping[CachedBlock, float], now: float) -> list[Batch]:
    """All blocks of `worth` in batches that each suit one shard, those with the blocks of most worth first.

    `now` is the worth of a block that is used now. Prompts that share most of their blocks are in one batch. A prompt
    that shares few has them repeated, so that an equal system prompt does not tie all prompts to one shard.
    """
    batches: list[Batch] = []
    open_in: dict[str, tuple[dict[CachedBlock, int], list[OfferedBlock]]] = {}
    for family in _families(worth):
        domain = family[0].domain
        places, blocks = open_in.get(domain, ({}, []))
        if not blocks or len(blocks) + len(family) > _BATCH_BLOCKS:
            places, blocks = open_in[domain] = {}, []
            batches.append(Batch(domain, blocks))
        for cached in family[:MOST_OFFERED]:
            if cached not in places:
                places[cached] = len(blocks)
                parent = -1 if cached.parent is None else places[cached.parent]
                blocks.append(OfferedBlock(parent, now - worth[cached], cached.token_ids))
    return batches


class HandOver:
    """Offers `batches` to the shards at `heirs` (host:port) for `within_s` seconds at most, on threads of its own.

    First each batch goes to a shard with free room; the rest then replaces what is worth less there. The other shards
    fetch the blocks at `address`, so the engine must go on until this is over. A shard that cannot be reached gets
    nothing.
    """

    def __init__(
        self,
        batches: Sequence[Batch],
        heirs: Sequence[str],
        identity: PeerIdentity,
        address: str,
        *,
        within_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._identity, self._address, self._clock = identity, address, clock
        self._heirs = list(heirs[:MOST_HEIRS])
        self._until_s = clock() + within_s
        self._open: set[TimedSocket] = set()
        self._is_closing = False
        self.taken = 0
        """Blocks that another shard has."""
        self._thread = Thread(target=self._run, args=(batches,), name="kv-hand-over", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"<HandOver: {self.taken} blocks taken, {len(self._heirs)} shards>"

    @property
    def is_over(self) -> bool:
        """Whether nothing is offered any more."""
        return not self._thread.is_alive()

    def close(self) -> None:
        """Break off."""
        self._is_closing = True
        for connection in list(self._open):
            with suppress(OSError):
                connection.shutdown()
        self._thread.join()

    def _run(self, batches: Sequence[Batch]) -> None:
        began_s, left = self._clock(), _Batches(batches)
        for may_evict in (False, True):
            threads = [Thread(target=self._offer, args=(heir, left, may_evict), daemon=True) for heir in self._heirs]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        offered = sum(len(batch.blocks) for batch in batches)
        took_s = self._clock() - began_s
        _log.info("%d of %d cached blocks were handed over in %.2f s", self.taken, offered, took_s)

    def _offer(self, heir: str, left: _Batches, may_evict: bool) -> None:
        """Offer the batches of `left` to `heir`, one after the other, until there are none or it has no more room."""
        batch: Batch | None = None
        try:
            with self._connected(heir) as connection:
                while (batch := left.take()) is not None:
                    connection.within(max(0.0, self._until_s - self._clock()))
                    has = offer(connection, Offer(self._address, batch.domain, may_evict, batch.blocks))
                    self.taken += sum(has)
                    is_full = not all(has)
                    left.end(batch.without(has) if is_full else None)
                    batch = None
                    if is_full:
                        return
        except (OSError, ValueError, PeerRefused) as error:
            if batch is not None:
                left.end(batch)
            self._heirs.remove(heir)
            if not self._is_closing:
                _log.warning("cached blocks cannot be handed over to %s: %s", heir, error)

    def _connected(self, heir: str) -> closing[TimedSocket]:
        connection = connect(heir)
        self._open.add(connection)
        try:
            connection.within(max(0.0, self._until_s - self._clock()))
            introduce(connection, self._identity)
        except BaseException:
            connection.close()
            raise
        return closing(connection)


class _Batches:
    """Batches that no shard has taken yet; several threads take them."""

    def __init__(self, batches: Sequence[Batch]) -> None:
        self._left = deque(batches)
        self._out = 0
        self._changed = Condition()

    def take(self) -> Batch | None:
        """The first batch, as soon as there is one; None if none is left and none can come back."""
        with self._changed:
            while not self._left and self._out:
                self._changed.wait()
            if not self._left:
                return None
            self._out += 1
            return self._left.popleft()

    def end(self, rest: Batch | None) -> None:
        """A batch was offered, and `rest` was not taken."""
        with self._changed:
            self._out -= 1
            if rest is not None:
                self._left.appendleft(rest)
            self._changed.notify_all()


def _families(worth: Mapping[CachedBlock, float]) -> list[list[CachedBlock]]:
    """The blocks of `worth` as lists of prompts that share most of their blocks; parents first, most worth first."""
    families: list[list[CachedBlock]] = []
    family_of: dict[CachedBlock, list[CachedBlock]] = {}
    ends = [cached for cached in worth if not cached.children]
    for end in sorted(ends, key=worth.__getitem__, reverse=True):
        new: list[CachedBlock] = []
        known: CachedBlock | None = end
        while known is not None and known not in family_of:
            new.append(known)
            known = known.parent
        shared = 0 if known is None else known.depth + 1
        if known is not None and shared > len(new):
            family = family_of[known]
        else:
            family = []
            families.append(family)
            while known is not None:
                family.append(known)
                known = known.parent
            family.reverse()
        family.extend(reversed(new))
        family_of.update(dict.fromkeys(new, family))
    return families
