"""Shards for benchmarks of placement: a cache of blocks with LRU eviction, and the time that prompts take.

Stand-ins: they compute nothing. Prompts are prefilled one after the other, answers drawn side by side.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field

from backends.base import CacheListener, Description, Load
from policies.catalogue import builtin_catalogue
from policies.explain import Explanation
from policies.nouns import Capability, Delta, Prompt, Request, ServiceClass, Tenant, Usage
from policies.quota.budget import Standing
from policies.rules import Rule
from policies.sla.config import Config
from policies.sla.pools import PoolSpec
from policies.sla.server import ServerSettings
from policies.sla.store import StoreSettings
from router.ask import Ask
from router.call.bodies import Held
from router.call.caller import Placement
from shards.kv.keys import BLOCK_TOKENS

MODEL = "simulated"
PREFILL_TOKENS_PER_S, STEP_S, FIXED_S = 16_000.0, 0.01, 0.02


@dataclass
class Cache:
    """One shard's cache, and its statistics. Callbacks in `hear` get every change."""

    name: str
    most_blocks: int
    pace: float = 1.0
    hear: list[CacheListener] = field(default_factory=list)
    hit_blocks: int = 0
    asked_blocks: int = 0
    held: OrderedDict[int, None] = field(default_factory=OrderedDict)
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    def take(self, keys: Sequence[int]) -> int:
        """The number of first `keys` that are cached; afterwards all of them are."""
        hits = next((at for at, key in enumerate(keys) if key not in self.held), len(keys))
        self.hit_blocks += hits
        self.asked_blocks += len(keys)
        new = [key for key in keys if key not in self.held]
        # of one prompt the last block is evicted first
        for key in reversed(keys):
            self.held[key] = None
            self.held.move_to_end(key)
        gone = [self.held.popitem(last=False)[0] for _ in range(max(0, len(self.held) - self.most_blocks))]
        for listener in self.hear:
            listener.store(self.name, new)
            if gone:
                listener.evict(self.name, gone)
        return hits


@dataclass
class SimulatedShard:
    """One router's connection to the shard with `cache`. `tells`: it reports its cache; else only the cached tokens."""

    cache: Cache
    tells: bool
    pool: str = "own"
    kind: str = "fake"
    address: str = ""
    name: str = field(init=False)

    def __post_init__(self) -> None:
        self.name = self.cache.name

    def describe(self) -> Description:
        return Description(frozenset({MODEL}), reports_cache=self.tells, capabilities=frozenset(Capability))

    def load(self) -> Load:
        return Load()

    def assets(self) -> Mapping[str, bytes]:
        return {}

    async def start(self) -> None:
        pass

    async def probe(self) -> None:
        pass

    async def close(self) -> None:
        pass

    async def generate(self, request: Request, prompt: Prompt) -> AsyncGenerator[Delta]:  # noqa: ARG002
        async with self.cache.turn:
            cached = self.cache.take(request.block_keys) * BLOCK_TOKENS
            uncached = max(1, request.prompt_tokens - cached)
            await asyncio.sleep((FIXED_S + uncached / PREFILL_TOKENS_PER_S) / self.cache.pace)
        yield Delta(text="x")
        await asyncio.sleep(request.max_new_tokens * STEP_S / self.cache.pace)
        usage = Usage(request.prompt_tokens, request.max_new_tokens, min(cached, request.prompt_tokens))
        yield Delta(finish_reason="stop", usage=usage)


@dataclass
class SimulatedCaller:
    """Requests an answer to `tokens` (little-endian uint32), and reads it."""

    id: str
    tokens: bytes
    new_tokens: int
    key: str | None = None
    trace: Mapping[str, str] = field(default_factory=dict)

    async def read(self, held: Held) -> Ask:  # noqa: ARG002 - there is no body
        path = "/v1/completions"
        return Ask(MODEL, (self.tokens,), ({},), path, max_new_tokens=self.new_tokens, stream=True)

    def limited(self, standing: Standing) -> None:
        pass

    def explain(self, index: int, explanation: Explanation) -> None:
        pass

    def place(self, index: int, placement: Placement) -> None:
        pass

    async def write(self, index: int, delta: Delta) -> None:
        pass

    def has_seen(self, index: int) -> bool:  # noqa: ARG002
        return False


def a_config(redis_url: str | None = None, replicas: int = 1) -> Config:
    """One pool, one class, the shipped default policy, and no limits."""
    return Config(
        classes={"chat": ServiceClass("chat", 0)},
        tenants={},
        rules=(Rule("chat"),),
        policies=builtin_catalogue().policies,
        pools={"own": PoolSpec("own", kind="fake", model=MODEL)},
        server=ServerSettings(),
        version="benchmark",
        tenant_by_key_hash={},
        anonymous=Tenant(name="all", domain="all", key_hashes=frozenset()),
        store=StoreSettings(redis=redis_url, replicas=replicas),
    )
