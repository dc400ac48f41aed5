"""Background tasks that must not end: restarted after a failure, which is logged."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

_log = logging.getLogger("pointsman.supervise")


async def supervise(
    name: str,
    work: Callable[[], Awaitable[None]],
    *,
    pause_s: float = 1.0,
    on_failure: Callable[[str], None] = lambda _: None,
) -> None:
    """Run `work` until it returns; after a failure log it, wait `pause_s` and start it again."""
    while True:
        try:
            return await work()
        except Exception:  # noqa: BLE001 - whatever it was, the router goes on
            _log.exception("background task %s failed and restarts in %.1f s", name, pause_s)
            on_failure(name)
            await asyncio.sleep(pause_s)
