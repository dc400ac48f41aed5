"""The bodies of the requests that a router reads, parses and holds, within the memory of the SLA file."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Self, TypeVar

from policies.errors import Overloaded, RequestTooLarge
from router.call.body_cost import JSON, Costs
from router.text.turns import Turns, at_once, once

_Result = TypeVar("_Result")

SMALL_BYTES = 64 * 2**10
"""Bodies up to here count only once they have come: a connection reads more than that ahead anyway."""

_INLINE_COST = 2**20
"""Bodies up to this cost are parsed on the event loop, in 3 ms at most; others in a thread, one after the other."""

_ARRIVING = 4
"""One in so many bytes is for bodies that arrive; all others are for parsed ones."""

_OF_ONE = 6
"""One request may take one in so many bytes."""

_TURN_BYTES = 2**20

SHARE = 3
"""A tenant may hold this many times what stays free: alone three quarters, each of two three sevenths."""

WAIT_S = 10.0
"""Longest time that a request waits for memory."""

MOST_WAITING = 256
MOST_WAITING_OF_A_TENANT = 64
"""Requests that may wait: each of them keeps up to half a megabyte that its connection has read."""


class Bodies:
    """The memory of all bodies, `most` bytes: a part for those that arrive, and the rest for those that are parsed.

    A body that waits for the second holds some of the first, and never the other way round: they always move on.
    """

    def __init__(self, most: int) -> None:
        self.arriving, self.parsed = Memory(most // _ARRIVING), Memory(most - most // _ARRIVING)
        self.most_of_one = most // _OF_ONE
        """Bytes that one request may take."""
        # one thread, because each that runs makes the event loop wait for the interpreter, up to 5 ms every time
        self.turns = Turns(1, _TURN_BYTES, name="parse")

    def __repr__(self) -> str:
        return f"<Bodies arriving {self.arriving!r}, parsed {self.parsed!r}>"

    def resize(self, most: int) -> None:
        """Hold at most so many bytes from now on."""
        self.arriving.resize(most // _ARRIVING)
        self.parsed.resize(most - most // _ARRIVING)
        self.most_of_one = most // _OF_ONE

    def check(self) -> None:
        """No memory is held; for an idle router."""
        self.arriving.check()
        self.parsed.check()

    def close(self) -> None:
        """End the thread."""
        self.turns.close()


class Held:
    """The memory that one call of `tenant` holds, a context manager: it is given back at the end."""

    def __init__(self, bodies: Bodies, tenant: str = "") -> None:
        self._bodies, self.tenant = bodies, tenant
        self._arriving = self._parsed = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.give_back()

    def give_back(self) -> None:
        """Give all of it back."""
        if self._arriving:
            self._leave_arriving()
        if self._parsed:
            self._bodies.parsed.give_back(self.tenant, self._parsed)
            self._parsed = 0

    def __repr__(self) -> str:
        return f"<Held by {self.tenant}: {self._arriving} arriving, {self._parsed} parsed>"

    async def arrive(self, size: int) -> None:
        """Wait for the memory of a body of at most `size` bytes that arrives: its pieces, and all of it joined.

        Raises Overloaded.
        """
        memory = self._bodies.arriving
        await memory.take(self.tenant, 2 * size)
        self._arriving += 2 * size

    async def take(self, size: int, what: str, hint: str) -> None:
        """Hold `size` bytes for `what`. Raises RequestTooLarge with `hint` if that is more than one request may take,
        Overloaded.
        """
        most = self._bodies.most_of_one
        if self._parsed + size > most:
            message = f"{what} would take more than {most >> 20} MiB of memory, which one request may take"
            raise RequestTooLarge(message, hint=f"{hint}, or have the operator raise server.memory")
        await self._bodies.parsed.take(self.tenant, size)
        self._parsed += size

    async def parse(self, body: bytes, read: Callable[[bytes], _Result], costs: Costs = JSON) -> _Result:
        """What `read` makes of `body`, once there is memory for it. Raises RequestTooLarge, Overloaded."""
        bodies = self._bodies
        cost = costs.rough(body) if len(body) <= SMALL_BYTES else _INLINE_COST + 1
        if cost > _INLINE_COST:
            cost = await bodies.turns.run(self.tenant, costs.in_turns(body, bodies.most_of_one))
        elif not self._parsed + self._arriving and cost <= bodies.most_of_one and bodies.parsed.lend(self.tenant, cost):
            # as nearly every body
            self._parsed = cost
            return read(body)
        await self.take(cost, "the body", "send fewer messages, members or token ids")
        parsed = await self.run(once(lambda: read(body)))
        if self._arriving:
            self._leave_arriving()
        return parsed

    async def run(self, work: Generator[int, None, _Result]) -> _Result:
        """The result of `work` on what is held: at once if that is small, or else in turns with other tenants.

        It yields the number of bytes that it has read since.
        """
        if self._parsed + self._arriving <= _INLINE_COST:
            return at_once(work)
        return await self._bodies.turns.run(self.tenant, work)

    def _leave_arriving(self) -> None:
        self._bodies.arriving.give_back(self.tenant, self._arriving)
        self._arriving = 0


@dataclass(eq=False, slots=True)
class _Waiter:
    size: int
    lent: asyncio.Future[None]


class Memory:
    """Lends `most` bytes. Some of it stays free for a tenant that holds nothing, however many hold all they may.

    Tenants that wait get turns in rotation, and so does each request of a tenant.
    """

    def __init__(self, most: int, *, wait_s: float = WAIT_S) -> None:
        self._most, self._wait_s = most, wait_s
        self._held: Counter[str] = Counter()
        self._total = 0
        self._waiting: OrderedDict[str, deque[_Waiter]] = OrderedDict()

    def __repr__(self) -> str:
        return f"<Memory {self._total} of {self._most} bytes lent, {self.waiting} requests wait>"

    @property
    def lent(self) -> int:
        """Bytes that are lent now."""
        return self._total

    @property
    def waiting(self) -> int:
        """Requests that wait."""
        return sum(map(len, self._waiting.values()))

    def check(self) -> None:
        """Nothing is lent, and no request waits; for an idle router."""
        assert not self._total, f"{self!r}: memory was not given back"
        assert not self._held, f"{self!r}: tenants hold {self._held}"
        assert not self._waiting, f"{self!r}: a request waits"

    def resize(self, most: int) -> None:
        """Lend `most` bytes from now on; more may be lent until they are given back."""
        self._most = most
        if self._waiting:
            self._serve()

    def lend(self, tenant: str, size: int) -> bool:
        """Lend `size` bytes to `tenant` if it may have them at once; may it?"""
        if not size:
            return True
        held = self._held[tenant]
        if tenant in self._waiting or held + size > SHARE * (self._most - self._total - size):
            return False
        self._held[tenant] = held + size
        self._total += size
        return True

    async def take(self, tenant: str, size: int) -> None:
        """Lend `size` bytes to `tenant`, perhaps after a while. Raises Overloaded."""
        if self.lend(tenant, size):
            return
        queue = self._waiting.get(tenant, ())
        if len(queue) >= MOST_WAITING_OF_A_TENANT or self.waiting >= MOST_WAITING:
            raise _overloaded()
        waiter = _Waiter(size, asyncio.get_running_loop().create_future())
        self._waiting.setdefault(tenant, deque()).append(waiter)
        try:
            async with asyncio.timeout(self._wait_s):
                await waiter.lent
        except BaseException as error:
            self._leave(tenant, waiter)
            if isinstance(error, TimeoutError):
                raise _overloaded() from None
            raise

    def give_back(self, tenant: str, size: int) -> None:
        """`tenant` holds `size` bytes less."""
        self._total -= size
        self._held[tenant] -= size
        if not self._held[tenant]:
            del self._held[tenant]
        if self._waiting:
            self._serve()

    def _fits(self, tenant: str, size: int) -> bool:
        return self._held[tenant] + size <= SHARE * (self._most - self._total - size)

    def _leave(self, tenant: str, waiter: _Waiter) -> None:
        """`waiter` waits no more; it gives back what it was lent in the same moment."""
        if waiter.lent.done() and not waiter.lent.cancelled():
            self.give_back(tenant, waiter.size)
            return
        queue = self._waiting[tenant]
        queue.remove(waiter)
        if not queue:
            del self._waiting[tenant]
        # those behind it may be smaller
        self._serve()

    def _serve(self) -> None:
        """Lend to the requests that wait, one of each tenant in turn, until none of the first ones fits."""
        is_changed = True
        while is_changed:
            is_changed = False
            for tenant in list(self._waiting):
                queue = self._waiting[tenant]
                if not self._fits(tenant, queue[0].size):
                    continue
                waiter = queue.popleft()
                self._held[tenant] += waiter.size
                self._total += waiter.size
                waiter.lent.set_result(None)
                self._waiting.move_to_end(tenant)
                if not queue:
                    del self._waiting[tenant]
                is_changed = True


def _overloaded() -> Overloaded:
    hint = "try again in a moment, or have the operator raise server.memory"
    return Overloaded("the router has no memory left for this request", hint=hint, retry_after_s=1.0)
