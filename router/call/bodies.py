"""The bodies of the requests that a router reads, parses and holds, within the memory of the SLA file."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Self, TypeVar

from policies.errors import RequestTooLarge
from router.call.body_cost import JSON, Costs
from router.call.memory import Memory
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

    def held(self, tenant: str = "") -> Held:
        """The memory of one call, a context manager: it is given back at the end."""
        return Held(self, tenant)

    def check(self) -> None:
        """No memory is held; for an idle router."""
        self.arriving.check()
        self.parsed.check()

    def close(self) -> None:
        """End the thread."""
        self.turns.close()


class Held:
    """The memory that one call of `tenant` holds."""

    def __init__(self, bodies: Bodies, tenant: str) -> None:
        self._bodies, self.tenant = bodies, tenant
        self._arriving = self._parsed = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
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
