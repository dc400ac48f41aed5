"""A router with something to show: backends that hold prefixes and take time, and tenants that ask.

The backends are stand-ins: their time follows `policies.learning.cost`, their cache is a set of block keys with a
bound, and they report both as shards do.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import islice, takewhile
from typing import Any

import aiohttp

from backends.base import CacheListener, Description, Load, Pinned
from policies.errors import BackendFailed
from policies.learning.cost import Latency
from policies.nouns import Capability, Delta, Prompt, Request, Usage
from policies.sla.config import Config
from policies.sla.parse import parse
from router.fleet.cluster.cluster import HealthRules
from router.start.app import Router
from shards.kv.keys import BLOCK_TOKENS
from tests.router.parts import COMPLETIONS, MODEL, some_assets

FILE = """
classes:
  interactive: {ttft_p95: 250ms, tpot_p95: 30ms, weight: 8}
  long-rag:    {ttft_p95: 800ms, tpot_p95: 40ms, weight: 4}
  batch:       {deadline: 15m, preemptible: true}
tenants:
  acme:
    keys: ["${env:ACME}"]
    weight: 4
    limits: {requests_per_minute: 2000, tokens_per_minute: 4M, budget_per_day: 40M}
  labs:    {keys: ["${env:LABS}"], weight: 2, limits: {tokens_per_minute: 2M}}
  archive: {keys: ["${env:ARCHIVE}"], classes: [batch], limits: {requests_per_minute: 80}}
  everyone: {anonymous: true, classes: [interactive]}
pools:
  own:  {kind: fake, at: ["x:1"], model: tiny}
rules:
  - {when: {tenant: archive}, class: batch}
  - {when: {prompt_tokens: ">= 1k", tenant: [acme, labs]}, class: long-rag}
  - {class: interactive}
server: {http: "127.0.0.1:0", grpc: off, admin: "127.0.0.1:0", drain: 1s}
"""
KEYS = {"acme": "key-of-acme", "labs": "key-of-labs", "archive": "key-of-archive"}


def a_scene(**server: Any) -> Config:
    environment = {name.upper(): key for name, key in KEYS.items()}
    config = parse(FILE, environment=environment)
    return replace(config, server=replace(config.server, **server))


@dataclass
class PacedBackend:
    """Takes `slots` requests, `latency` of time, and keeps `blocks` blocks. `is_well` may change at any time."""

    name: str
    pool: str = "own"
    kind: str = "shard"
    address: str = ""
    slots: int = 6
    blocks: int = 500
    latency: Latency = field(default_factory=lambda: Latency(fixed_s=0.01, token_s=2.5e-4, step_s=0.012))
    is_well: bool = True
    listener: CacheListener | None = None
    running: int = 0
    waiting: int = 0
    held: OrderedDict[int, None] = field(default_factory=OrderedDict)
    pins: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._turn = asyncio.Semaphore(self.slots)

    def describe(self) -> Description | None:
        able = frozenset(Capability)
        return Description(
            frozenset({MODEL}), 32768, speaks_tokens=True, reports_cache=True, preempts=True, capabilities=able
        )

    def load(self) -> Load:
        size = self.blocks * BLOCK_TOKENS
        used = len(self.held) * BLOCK_TOKENS * 0.8 + self.running * 900
        return Load(
            running=self.running,
            waiting=self.waiting,
            waiting_tokens=self.waiting * 500,
            free_tokens=max(0, int(size - used)),
            total_tokens=size,
            max_requests=self.slots + 2,
            pinnable_tokens=size // 4 - BLOCK_TOKENS * len(self._pinned()),
            reported_at=time.monotonic(),
        )

    def assets(self) -> Mapping[str, bytes]:
        return some_assets()

    async def start(self) -> None:
        pass

    async def probe(self) -> None:
        if not self.is_well:
            raise BackendFailed(f"{self.name} does not answer")

    async def close(self) -> None:
        pass

    async def pin(self, name: str, keys: Sequence[int], *, domain: str, for_s: float) -> Pinned:
        held = tuple(takewhile(self.held.__contains__, keys))
        self.pins[name] = held[: max(0, self.blocks // 4 - len(self._pinned()))]
        return Pinned(len(held), len(self.pins[name]))

    async def unpin(self, name: str) -> int:
        return len(self.pins.pop(name, ()))

    async def clear_domain(self, domain: str) -> int:
        return 0

    async def generate(self, request: Request, prompt: Prompt) -> AsyncIterator[Delta]:
        if not self.is_well:
            raise BackendFailed(f"{self.name} cannot be reached")
        self.waiting += 1
        try:
            await self._turn.acquire()
        finally:
            self.waiting -= 1
        self.running += 1
        try:
            async for delta in self._answer(request):
                yield delta
        finally:
            self.running -= 1
            self._turn.release()

    async def _answer(self, request: Request) -> AsyncIterator[Delta]:
        known = next((at for at, key in enumerate(request.block_keys) if key not in self.held), len(request.block_keys))
        cached = min(known * BLOCK_TOKENS, request.prompt_tokens - 1)
        await asyncio.sleep(self.latency.prefill_s(request.prompt_tokens - cached, cached))
        self._keep(request.block_keys)
        for number in range(request.max_new_tokens):
            if not self.is_well:
                raise BackendFailed(f"{self.name} has died")
            if number:
                await asyncio.sleep(self.latency.tpot_s(self.running))
            yield Delta(text="a ", token_ids=(number,))
        yield Delta(finish_reason="length", usage=Usage(request.prompt_tokens, request.max_new_tokens, cached))

    def _keep(self, keys: tuple[int, ...]) -> None:
        for key in reversed(keys):
            self.held.pop(key, None)
            self.held[key] = None
        pinned = self._pinned()
        loose = (key for key in self.held if key not in pinned)
        gone = list(islice(loose, max(0, len(self.held) - self.blocks)))
        for key in gone:
            del self.held[key]
        if self.listener is not None:
            self.listener.store(self.name, keys)
            self.listener.evict(self.name, gone)

    def _pinned(self) -> set[int]:
        return {key for keys in self.pins.values() for key in keys}


def listening(*backends: PacedBackend) -> Callable[[CacheListener], tuple[PacedBackend, ...]]:
    """Makes `backends` report their caches to the router's listener."""

    def connected(listener: CacheListener) -> tuple[PacedBackend, ...]:
        for backend in backends:
            backend.listener = listener
        return backends

    return connected


@asynccontextmanager
async def a_running_scene(*backends: PacedBackend, config: Config | None = None) -> AsyncIterator[Router]:
    made = backends or (PacedBackend("own-0"), PacedBackend("own-1"))
    rules = HealthRules(probe_every_s=0.05)
    async with Router(config or a_scene(), backends=listening(*made), health=rules, rng=random.Random(7)) as router:
        assert await router.wait_until_reached(5)
        yield router


WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog"]


def a_document(seed: int, words: int) -> str:
    rng = random.Random(seed)
    return " ".join(rng.choice(WORDS) for _ in range(words))


async def ask(router: Router, http: aiohttp.ClientSession, tenant: str, prompt: str, *, tokens: int = 8) -> int:
    """One completion; its HTTP status."""
    headers = {"authorization": f"Bearer {KEYS[tenant]}"} if tenant in KEYS else {}
    body = {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "stream": True}
    async with http.post(router.http_url + COMPLETIONS, json=body, headers=headers) as reply:
        await reply.read()
        return reply.status


async def keep(router: Router, http: aiohttp.ClientSession, tenant: str, prompt: str, **wish: Any) -> dict[str, Any]:
    """`POST /v1/prefixes`, and what it answers."""
    body = {"model": MODEL, "prompt": prompt, **wish}
    headers = {"authorization": f"Bearer {KEYS[tenant]}"}
    async with http.post(f"{router.http_url}/v1/prefixes", json=body, headers=headers) as reply:
        return dict(await reply.json())


@dataclass
class Crowd:
    """Tenants with many requests: chats that grow, questions about documents, and a batch."""

    router: Router
    http: aiohttp.ClientSession
    rng: random.Random = field(default_factory=lambda: random.Random(11))

    async def chat(self, tenant: str) -> None:
        while True:
            document = a_document(self.rng.randrange(2**30), 12)
            for _ in range(4):
                await ask(self.router, self.http, tenant, document, tokens=self.rng.randint(6, 24))
                document += " " + a_document(self.rng.randrange(2**30), 20)
                await asyncio.sleep(self.rng.uniform(0.05, 0.6))

    async def read(self, tenant: str, document: int, words: int) -> None:
        while True:
            question = a_document(self.rng.randrange(2**30), 10)
            await ask(self.router, self.http, tenant, f"{a_document(document, words)} {question}", tokens=16)
            await asyncio.sleep(self.rng.uniform(0.1, 0.9))

    async def work(self, tenant: str) -> None:
        while True:
            text = a_document(self.rng.randrange(2**30), 260)
            status = await ask(self.router, self.http, tenant, text, tokens=40)
            await asyncio.sleep(self.rng.uniform(1.0, 5.0) if status == 429 else self.rng.uniform(0.05, 0.3))


@asynccontextmanager
async def a_crowd(router: Router, *, times: int = 1) -> AsyncIterator[None]:
    """A crowd that asks until the context is left."""
    async with aiohttp.ClientSession() as http:
        crowd = Crowd(router, http)
        works = [
            *(crowd.chat(tenant) for tenant in ("acme", "acme", "labs", "everyone") * times),
            *(crowd.read("acme", number % 3, 1700) for number in range(4 * times)),
            *(crowd.read("labs", 10 + number % 2, 1250) for number in range(2 * times)),
            *(crowd.work("archive") for _ in range(4 * times)),
        ]
        tasks = [asyncio.create_task(work) for work in works]  # type: ignore[arg-type]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.gather(*tasks, return_exceptions=True)
