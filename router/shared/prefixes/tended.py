"""One prefix that this router looks after."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from policies.errors import ExpectedError
from router.ask import Ask

Wish = tuple[float, int]
"""Until when pins are to stay, and of which life they are."""


@dataclass(eq=False, slots=True)
class Tended:
    """A prefix that this router looks after: what to compute, and the task that does so, if one does now.

    `pinned` is the wish that all its pins were told. `under_way` are the backends that the task tries; `failure` is why
    it did not get further. `told_at` is when others were told of it although nothing had changed.
    """

    ask: Ask
    keys: tuple[int, ...]
    told_at: float
    pinned: Wish | None = None
    task: asyncio.Task[None] | None = None
    under_way: set[str] = field(default_factory=set)
    failure: ExpectedError | None = None
    retry_at: float = 0.0
    backoff_s: float = 0.0
