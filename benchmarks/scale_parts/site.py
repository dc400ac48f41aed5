"""One router's beliefs and cluster with its exchange, without protocols: everything that routers share, and no more."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from backends.fake import FakeBackend
from policies.nouns import Delta, Request, Usage
from router.fleet.beliefs import Beliefs
from router.fleet.cluster.cluster import Cluster
from router.fleet.prompt_keys import PromptKeys
from router.shared.replicas.replicas import Replicas
from router.shared.replicas.shelf import RedisShelf
from router.shared.replicas.stream import RedisStream
from shards.kv.keys import BLOCK_TOKENS
from tests.policies.builders import a_backend, a_request

NEW_TOKENS = 64


def names(count: int) -> list[str]:
    return [f"own-{number}" for number in range(count)]


@dataclass
class Site:
    """A router called `by` in a `cell` at the Redis at `url`, with `backends`. `learns`: they have no cache events."""

    url: str
    by: str
    backends: int
    learns: bool = True
    cell: int = 0
    late_s: list[float] = field(default_factory=list)
    """The delays of the others' news."""

    def __post_init__(self) -> None:
        self.now, key = asyncio.get_running_loop().time, f"pointsman:cell:{self.cell}:replicas"
        self.beliefs = Beliefs(lambda _: not self.learns, self.now)
        self.cluster = Cluster([FakeBackend(name) for name in names(self.backends)], clock=self.now)
        hear = self.beliefs.hear

        def timed(news: object, at: float) -> None:
            self.late_s.append(self.now() - at)
            hear(news, at)  # type: ignore[arg-type]

        self.beliefs.hear = timed  # type: ignore[method-assign]
        self.replicas = Replicas(
            RedisStream(self.url, self.by, key=key),
            RedisShelf(self.url, key=f"{key}:snapshot"),
            self.by,
            beliefs=self.beliefs,
            cluster=self.cluster,
            clock=self.now,
        )

    async def serve(self, backend: str, keys: tuple[int, ...], *, first_s: float, busy_s: float) -> None:
        """A prompt goes to `backend` and is answered: its first token after `first_s`, its end after `busy_s`."""
        request, prompt = self._request(len(keys)), PromptKeys(keys)
        flight = self.cluster.begin(backend, request, request.prompt_tokens)
        self.beliefs.sent(backend, prompt)
        await asyncio.sleep(first_s)
        flight.heard(Delta(text="x"), self.now())
        await asyncio.sleep(busy_s - first_s)
        usage = Usage(request.prompt_tokens, NEW_TOKENS, request.prompt_tokens // 2)
        flight.heard(Delta(finish_reason="stop", usage=usage), self.now())
        self.cluster.end(flight)
        self.beliefs.ended(prompt, flight, a_backend(backend))

    def _request(self, blocks: int) -> Request:
        return a_request(prompt_tokens=blocks * BLOCK_TOKENS)
