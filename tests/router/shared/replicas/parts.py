"""One router's beliefs and cluster among replicas, on a real Redis."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from backends.fake import FakeBackend
from policies.nouns import Delta, Usage
from router.fleet.beliefs import Beliefs
from router.fleet.cluster.cluster import Cluster
from router.fleet.prompt_keys import PromptKeys
from router.shared.replicas.replicas import ReplicaOptions, Replicas
from router.shared.replicas.shelf import RedisShelf, Shelf
from router.shared.replicas.stream import MOST_ENTRIES, RedisStream
from tests.policies.builders import a_backend, a_request

KEYS = tuple(range(1, 11))
TOKENS = 64 * len(KEYS)
KEY = "pointsman:replicas"
QUICK = ReplicaOptions(deadline_s=0.1, first_backoff_s=0.01, most_backoff_s=0.05, patience_s=0.3, most_kept=500)


@dataclass
class Site:
    """One router's beliefs and cluster, and its replicas; counts events. Its clock is moved by `ahead_s`."""

    url: str
    by: str
    options: ReplicaOptions = QUICK
    tells: bool = False
    ahead_s: float = 5000.0
    most: int = MOST_ENTRIES
    shelf: Shelf | None = None
    backends: tuple[str, ...] = ("a", "b")
    events: list[str] = field(default_factory=list)
    states: list[tuple[bool, int]] = field(default_factory=list)
    beliefs: Beliefs = field(init=False)
    cluster: Cluster = field(init=False)
    replicas: Replicas = field(init=False)

    def __post_init__(self) -> None:
        self.beliefs = Beliefs(lambda _: self.tells, self.now)
        self.cluster = Cluster([FakeBackend(name) for name in self.backends], clock=self.now)
        self.replicas = Replicas(
            RedisStream(self.url, self.by, most=self.most),
            self.shelf or RedisShelf(self.url),
            self.by,
            beliefs=self.beliefs,
            cluster=self.cluster,
            clock=self.now,
            options=self.options,
            on_event=self.events.append,
            on_state=lambda exact, others: self.states.append((exact, others)),
        )

    def now(self) -> float:
        return asyncio.get_running_loop().time() + self.ahead_s

    def answer(self, keys: tuple[int, ...] = KEYS, *, cached: int = 0, at: str = "a") -> None:
        """A prompt goes to `at` and is answered."""
        flight = self.cluster.begin(at, a_request(prompt_tokens=TOKENS), TOKENS)
        self.beliefs.sent(at, PromptKeys(keys))
        flight.heard(Delta(text="x"), self.now())
        flight.heard(Delta(finish_reason="stop", usage=Usage(TOKENS, 1, cached)), self.now())
        self.cluster.end(flight)
        self.beliefs.ended(PromptKeys(keys), flight, a_backend(at))

    def expected(self, keys: tuple[int, ...] = KEYS) -> float:
        match = self.beliefs.longest(PromptKeys(keys)).get("a")
        return match.expected_blocks if match else 0.0

    def elsewhere(self) -> tuple[int, int, int]:
        (view,) = [backend for backend in self.cluster.view(self.now()).backends if backend.name == "a"]
        return view.running, view.waiting, view.waiting_tokens


@asynccontextmanager
async def a_site(url: str, by: str, options: ReplicaOptions = QUICK, **parts: Any) -> AsyncIterator[Site]:
    site = Site(url, by, options, **parts)
    await site.replicas.start()
    try:
        yield site
    finally:
        await site.replicas.close()
        site.replicas.check()
        site.cluster.check()


def some_keys(count: int, *, seed: int) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.getrandbits(64) for _ in range(count))


def fell(site: Site, fault: str) -> Callable[[], bool]:
    return lambda: f"replicas_{fault}" in site.events and not site.replicas.is_exact
