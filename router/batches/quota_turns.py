"""Lines of one job in turn at a quota: a refusal stops all of them, and then they go on one by one."""

from __future__ import annotations

import asyncio
import math

from router.waiters import Waiter, Waiters


class QuotaTurns:
    """Any number of line calls may try to pass, until one is refused. The turns of all others are void then, and no
    line gets one for as long as the refusal says. Then one gets a turn after the other, and as many at a time as have
    passed since."""

    def __init__(self) -> None:
        self._most = math.inf
        self._trying = set[str]()
        self._waiters = Waiters[None, str, bool](take_back=lambda waiter, _: self.leave(waiter.wish), left=self._give)
        self._rest: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<QuotaTurns {len(self._trying)} of {max(1.0, self._most)} try, {len(self._waiters)} wait>"

    async def take(self, line: str) -> None:
        """Return when it is the turn of the call `line`, which `leave` ends."""
        if not self._waiters and self._may_try():
            self._trying.add(line)
        else:
            await self._waiters.wait(None, line)

    def holds(self, line: str) -> bool:
        """Whether no other line was refused since `line` took its turn."""
        return line in self._trying

    def passed(self, line: str) -> None:
        """The call `line` has its quota; idempotent."""
        if line in self._trying:
            self._trying.remove(line)
            self._most += 1
            self._give()

    def refused(self, seconds: float) -> None:
        """A line has got no quota, and would get none before `seconds` are over."""
        self._most = 0.0
        self._trying.clear()
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        if self._rest is None or self._rest.when() < until:
            self.close()
            self._rest = loop.call_at(until, self._rested)

    def leave(self, line: str) -> None:
        """The call `line` does not try any more; idempotent."""
        self._trying.discard(line)
        self._give()

    def close(self) -> None:
        """Give no more turns after a rest."""
        if self._rest is not None:
            self._rest.cancel()

    def _rested(self) -> None:
        self._rest = None
        self._give()

    def _give(self) -> None:
        self._waiters.serve(self._turn)

    def _turn(self, waiter: Waiter[None, str, bool]) -> bool | None:
        if not self._may_try():
            return None
        self._trying.add(waiter.wish)
        return True

    def _may_try(self) -> bool:
        return self._rest is None and len(self._trying) < max(1.0, self._most)
