"""Callers that wait until they are lent something: the one queue behind memory, threads, quotas and room for lines."""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Generic, TypeVar

Owner = TypeVar("Owner", bound=Hashable)
Wish = TypeVar("Wish")
Lent = TypeVar("Lent")


@dataclass(eq=False, slots=True)
class Waiter(Generic[Owner, Wish, Lent]):
    """A caller that waits for `wish`, as number `number` of all that ever waited. `kind`: see Waiters."""

    owner: Owner
    kind: Hashable
    wish: Wish
    number: int
    lent: asyncio.Future[Lent]


class Waiters(Generic[Owner, Wish, Lent]):
    """Callers that wait. Owners take turns, and the callers of one owner with wishes of one kind keep their order. Of
    its kinds, that with the oldest caller is served first, and one that cannot be served is passed by the others.

    A caller that was cancelled or has waited too long is passed over from that moment on. If it was served in the same
    moment, `take_back` gets the waiter with what it was lent. `left` is called when a caller has left without having
    been served: others may be served now that stood behind it. What happens to one caller never raises in another.
    """

    def __init__(
        self, *, take_back: Callable[[Waiter[Owner, Wish, Lent], Lent], object], left: Callable[[], object]
    ) -> None:
        self._take_back, self._left = take_back, left
        self.by_owner: OrderedDict[Owner, dict[Hashable, OrderedDict[int, Waiter[Owner, Wish, Lent]]]] = OrderedDict()
        """The owners with callers that wait, in their turns: changed here alone."""
        self._numbers, self._count = count(), 0

    def __repr__(self) -> str:
        return f"<Waiters {self._count} of {len(self.by_owner)} owners>"

    def __len__(self) -> int:
        return self._count

    def count_of(self, owner: Owner) -> int:
        """The callers of `owner` that wait."""
        return sum(map(len, self.by_owner.get(owner, {}).values()))

    def has(self, owner: Owner, kind: Hashable) -> bool:
        """Whether a caller of `owner` waits for a wish of this kind."""
        return kind in self.by_owner.get(owner, ())

    async def wait(self, owner: Owner, wish: Wish, *, kind: Hashable = None, timeout_s: float | None = None) -> Lent:
        """What `serve` lends to this caller. Raises TimeoutError after `timeout_s`, and what was raised in place of
        lending."""
        loop = asyncio.get_running_loop()
        waiter = Waiter[Owner, Wish, Lent](owner, kind, wish, next(self._numbers), loop.create_future())
        self.by_owner.setdefault(owner, {}).setdefault(kind, OrderedDict())[waiter.number] = waiter
        self._count += 1
        # not `asyncio.timeout`, which only cancels: what has expired must have left before anything is lent again
        timer = None if timeout_s is None else loop.call_later(timeout_s, self._expire, waiter)
        try:
            return await waiter.lent
        except BaseException:
            self._abandon(waiter)
            raise
        finally:
            if timer is not None:
                timer.cancel()

    def first(self) -> Iterator[Waiter[Owner, Wish, Lent]]:
        """The first caller of each owner and kind."""
        for owner in list(self.by_owner):
            yield from self._heads(owner)

    def serve(self, lend: Callable[[Waiter[Owner, Wish, Lent]], Lent | None], most: float = math.inf) -> int:
        """Give what `lend` returns to callers in their turns, until it returns None for the first of each owner and
        kind, or `most` were served; returns how many were."""
        served, is_changed = 0, True
        while is_changed:
            is_changed = False
            for owner in list(self.by_owner):
                if served >= most:
                    return served
                if self._serve_one(owner, lend):
                    served, is_changed = served + 1, True
        return served

    def check(self) -> None:
        """Assert that the callers are counted right; for tests."""
        counted = sum(map(self.count_of, self.by_owner))
        assert counted == self._count, f"{self!r}: {counted} callers are there"
        assert all(kinds and all(kinds.values()) for kinds in self.by_owner.values()), f"{self!r}: an owner has none"

    def _serve_one(self, owner: Owner, lend: Callable[[Waiter[Owner, Wish, Lent]], Lent | None]) -> bool:
        """Whether a caller of `owner` was served."""
        for waiter in sorted(self._heads(owner), key=lambda waiter: waiter.number):
            try:
                lent = lend(waiter)
            except Exception as error:  # noqa: BLE001 - it is this caller's failure, not that of another one
                self._remove(waiter)
                waiter.lent.set_exception(error)
                continue
            if lent is not None:
                if owner in self.by_owner:
                    self.by_owner.move_to_end(owner)
                self._remove(waiter)
                waiter.lent.set_result(lent)
                return True
        return False

    def _heads(self, owner: Owner) -> list[Waiter[Owner, Wish, Lent]]:
        """The first caller of each kind that still waits. Those that were cancelled leave."""
        heads = []
        for callers in list(self.by_owner.get(owner, {}).values()):
            while callers:
                waiter = next(iter(callers.values()))
                if not waiter.lent.done():
                    heads.append(waiter)
                    break
                self._remove(waiter)
        return heads

    def _expire(self, waiter: Waiter[Owner, Wish, Lent]) -> None:
        if not waiter.lent.done():
            self._remove(waiter)
            waiter.lent.set_exception(TimeoutError())
            self._left()

    def _abandon(self, waiter: Waiter[Owner, Wish, Lent]) -> None:
        """The caller has gone: it gives back what it was lent in the same moment, or leaves."""
        lent = waiter.lent
        if lent.done() and not lent.cancelled():
            if lent.exception() is None:
                self._take_back(waiter, lent.result())
            return
        self._remove(waiter)
        self._left()

    def _remove(self, waiter: Waiter[Owner, Wish, Lent]) -> None:
        """It waits no more; idempotent."""
        kinds = self.by_owner.get(waiter.owner, {})
        callers = kinds.get(waiter.kind)
        if callers is None or callers.pop(waiter.number, None) is None:
            return
        self._count -= 1
        if not callers:
            del kinds[waiter.kind]
        if not kinds:
            del self.by_owner[waiter.owner]
