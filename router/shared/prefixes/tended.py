"""One prefix that this router maintains."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from policies.errors import ExpectedError
from router.ask import Ask

Wish = tuple[float, int]
"""Time until which pins should stay, and their `life`."""


@dataclass(eq=False, slots=True)
class Tended:
    """A prefix that this router maintains: what to compute, and the task that does so, if one runs now.

    `pinned` is the wish that all its pins have got. `under_way` are the backends that the task tries; `failure` is the
    error that ended it. `sent_at` is when it was last repeated to other routers.
    """

    ask: Ask
    keys: tuple[int, ...]
    sent_at: float
    pinned: Wish | None = None
    task: asyncio.Task[None] | None = None
    under_way: set[str] = field(default_factory=set)
    failure: ExpectedError | None = None
    retry_at: float = 0.0
    backoff_s: float = 0.0
