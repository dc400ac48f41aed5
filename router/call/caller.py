"""The client of a call as the pipeline sees it, over any protocol."""

from __future__ import annotations

from collections.abc import Coroutine, Mapping
from typing import Any, Protocol

import msgspec

from policies.explain import Explanation
from policies.nouns import Beginning, Delta, Request
from policies.quota.budget import Standing
from router.ask import Ask
from router.call.bodies import Held


class CallerGone(Exception):
    """The client closed its connection and reads no answer."""


class Placement(msgspec.Struct, frozen=True):
    """Where one prompt of a call went: what response headers and gRPC's Placement tell the client.

    `beginning`: the part of the answer that the client has from another backend, which this one continues.
    """

    request: Request
    pool: str
    backend: str
    beginning: Beginning | None = None


class Caller(Protocol):
    """One call. `id` names it everywhere; `key` is the credential that it came with."""

    id: str
    key: str | None

    @property
    def trace(self) -> Mapping[str, str]:
        """`traceparent` and `tracestate`, as far as the client sent them."""
        ...

    async def read(self, held: Held) -> Ask:
        """What the client asks for, in memory that is `held` until the call ends.

        Raises InvalidRequest, RequestTooLarge, Overloaded, CallerGone.
        """
        ...

    def limited(self, standing: Standing) -> None:
        """What is left of the tenant's limits, for the head of the answer; called first, also before a refusal."""
        ...

    def explain(self, index: int, explanation: Explanation) -> None:
        """Why prompt number `index` goes where it goes, or nowhere; called before `place`, where the Ask wants it."""
        ...

    def place(self, index: int, placement: Placement) -> None:
        """Prompt number `index` goes there. Called again when another backend tries: unless that continues the answer,
        forget what came before.
        """
        ...

    def write(self, index: int, delta: Delta) -> Coroutine[Any, Any, None] | None:
        """Pass one piece of the answer to prompt number `index` on. Raises CallerGone.

        What comes back is to be awaited before the next piece, as when the client reads slowly; None: it may come now.
        """
        ...

    def has_seen(self, index: int) -> bool:
        """May the client have seen a piece of the answer to prompt `index`? Then no other backend may start over."""
        ...
