"""The tasks that look again and again at the servers of a cluster, one for each."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection

from backends.base import Backend
from policies.health import HealthRules
from router.supervise import supervise


class Probes:
    """Calls `probe` with the name of each server, as often as its rules say. `on_reached` hears of each backend once,
    when it has said for the first time what it serves."""

    def __init__(self, probe: Callable[[str], Awaitable[bool]], on_reached: Callable[[Backend], None]) -> None:
        self._probe, self._on_reached = probe, on_reached
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def __repr__(self) -> str:
        return f"<Probes of {', '.join(self._tasks) or 'nothing'}>"

    def names(self) -> Collection[str]:
        """The servers that are probed, by the names of their backends of rank 0."""
        return self._tasks.keys()

    def begin(self, backend: Backend, rules: HealthRules) -> None:
        """Probe `backend` from now on."""
        work = supervise(f"probe of {backend.name}", lambda: self._keep_probing(backend, rules))
        self._tasks[backend.name] = asyncio.create_task(work, name=f"probe of {backend.name}")

    async def end(self, name: str) -> None:
        """Probe `name` no more."""
        task = self._tasks.pop(name, None)
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def close(self) -> None:
        """Probe nothing any more."""
        tasks = list(self._tasks.values())
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _keep_probing(self, backend: Backend, rules: HealthRules) -> None:
        reached = False
        while True:
            serves = await self._probe(backend.name)
            if not reached and backend.describe() is not None:
                reached = True
                self._on_reached(backend)
            if not reached:
                every_s = rules.first_probe_every_s
            else:
                every_s = rules.probe_every_s if serves else min(rules.retry_probe_s, rules.probe_every_s)
            await asyncio.sleep(every_s)
