"""Waits until a loop has no more to do, without a guess of how long that takes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def still(value: Callable[[], T], turns: int = 500) -> T:
    """`value()`, once it has stayed the same for this many turns of the event loop.

    A task of this loop that waits for nothing runs in each turn. So what stays the same is held back, and not slow.
    """
    before, same = value(), 0
    while same < turns:
        await asyncio.sleep(0)
        now = value()
        same = same + 1 if now == before else 0
        before = now
    return before
