"""Whatever backends, clients and files do at once: each request ends, by its rules, and nothing is left."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field, replace

import pytest

from backends.base import Description, Load
from backends.fake import FakeBackend
from policies.errors import BackendFailed, ExpectedError, Overloaded, Unreached
from policies.explain import Explanation
from policies.health import HealthRules
from policies.nouns import Delta, Prompt, Request, Usage
from policies.sla.config import Config
from policies.sla.parse import parse
from router.call.bodies import Held
from router.call.caller import CallerGone, Placement
from router.call.gateway import Gateway
from router.call.pipeline import serve
from router.protocols.openai.request import chat_ask
from tests.router.parts import built
from tests.virtual_time import run_virtually

RULES = HealthRules(failures=2, probe_every_s=0.5, retry_s=0.2, slow_start_s=2.0)
FILE = """
classes:
  chat: {{ttft_p95: 800ms, weight: 4}}
  rag: {{ttft_p95: 5s, floor: 20%}}
  batch: {{deadline: 20s, preemptible: true}}
  plain: {{}}
tenants:
  acme: {{keys: ["${{env:ACME}}"], weight: {weight}, limits: {{tokens_per_minute: 6M, concurrent: 40}}}}
  labs: {{keys: ["${{env:LABS}}"]}}
rules:
  - {{when: {{priority: batch}}, class: batch, pools: [own]}}
  - {{when: {{priority: plain}}, class: plain, pools: [own]}}
  - {{when: {{prompt_tokens: ">= 300"}}, class: rag, pools: [own]}}
  - {{class: chat, pools: [own]}}
on_miss: {{chat: {chat}, rag: {rag}}}
queue: {{ageing: 4s, most: {most}, outage: 3s}}
server: {{max_concurrent: {concurrent}}}
pools:
  own: {{kind: fake, at: ["own:1"], model: large}}
  far: {{kind: fake, at: ["far:1"], model: large}}
  odd: {{kind: fake, at: ["odd:1"], model: small}}
"""
STEPS = (
    "[{queue: 2s}, {spill: far}, {shed: 429}]",
    "[{shed: 503}]",
    "[{queue: 1s}]",
    "[{degrade: small}, {spill: far}]",
    "[{queue: 2s}, {degrade: small}]",
)
SLOWEST_S = 120.0
"""Far more than the slowest machine takes for all that may wait before a request."""


def a_file(rng: random.Random) -> Config:
    steps = {name: rng.choice(STEPS) for name in ("chat", "rag")}
    bounds = {"most": rng.choice((3, 10, 200)), "concurrent": rng.choice((2, 6, 200))}
    environment = {"ACME": "ACME", "LABS": "LABS"}
    return parse(FILE.format(weight=rng.choice((1, 4)), **steps, **bounds), environment=environment)


@dataclass(slots=True)
class Machine(FakeBackend):
    """Computes one prompt after the other; fails, is too busy and dies at random. What it tells of itself differs."""

    rng: random.Random = field(default_factory=random.Random)
    slots: int | None = None
    kv_tokens: int | None = None
    is_whole: bool = False
    pace: float = 1.0
    died: asyncio.Event = field(default_factory=asyncio.Event)
    here: dict[str, int] = field(default_factory=dict)
    prefill: asyncio.Lock = field(default_factory=asyncio.Lock)

    def describe(self) -> Description | None:
        description = FakeBackend.describe(self)
        assert description is not None
        return replace(description, preempts=self.kv_tokens is not None, may_answer_whole=self.is_whole)

    def load(self) -> Load:
        if self.slots is None:
            return Load()
        free = None if self.kv_tokens is None else max(0, self.kv_tokens - sum(self.here.values()))
        now = asyncio.get_running_loop().time()
        return Load(running=len(self.here), waiting=0, max_requests=self.slots, free_tokens=free, reported_at=now)

    async def nap(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(self.pace * seconds):
                await self.died.wait()
        except TimeoutError:
            return
        raise BackendFailed(f"{self.name} died")

    async def generate(self, request: Request, prompt: Prompt) -> AsyncGenerator[Delta]:
        rng = self.rng
        if not self.is_well:
            raise Unreached(f"{self.name} is away")
        if rng.random() < 0.02:
            raise Overloaded("busy there")
        self.here[request.id] = request.prompt_tokens
        try:
            async with self.prefill:
                await self.nap((0.02 + request.prompt_tokens * 1e-3) * (20 if rng.random() < 0.02 else 1))
            if rng.random() < 0.05:
                raise BackendFailed("at once")
            count = min(rng.choice((0, 0, 1, 3, 30)), request.max_new_tokens)
            async for delta in self.drawn(count, is_whole=self.is_whole and not request.stream):
                yield delta
            usages = (None, Usage(request.prompt_tokens, 3, request.prompt_tokens // 2), Usage(), Usage(10, 3, 500))
            yield Delta(finish_reason="stop", usage=rng.choice(usages))
        finally:
            del self.here[request.id]

    async def drawn(self, count: int, *, is_whole: bool) -> AsyncGenerator[Delta]:
        if is_whole:
            await self.nap(count * 0.02)
            yield Delta(text="x" * count, tokens=count, is_whole=True)
            return
        for number in range(count):
            yield Delta(text="x", token_ids=(number,))
            await self.nap(0.02)
            if self.rng.random() < 0.01:
                raise BackendFailed("midway")

    def die(self) -> None:
        self.is_well = False
        self.died.set()

    def revive(self) -> None:
        self.is_well, self.died = True, asyncio.Event()


def a_machine(rng: random.Random, name: str) -> Machine:
    pool, slots = name.partition("-")[0], rng.choice((None, 2, 4))
    kv_tokens = 3000 if slots and rng.random() < 0.5 else None
    models = frozenset({"small" if pool == "odd" else "large"})
    made = Machine(name, pool, models=models, rng=rng, slots=slots, kv_tokens=kv_tokens)
    made.is_whole, made.pace = rng.random() < 0.3, rng.choice((0.2, 1.0, 1.0, 5.0))
    return made


class Asker:
    """One caller: it sends any request, may disconnect, and compares its headers with what happens."""

    def __init__(self, number: int, rng: random.Random) -> None:
        self.id, self.key = f"r{number}", rng.choice(("ACME", "LABS"))
        self.trace: dict[str, str] = {}
        self.priority = rng.choice((None, None, "batch", "plain"))
        headers = {} if self.priority is None else {"x-pointsman-priority": self.priority}
        text = f"document {rng.randrange(4)} " * rng.choice((1, 30, 100, 300))
        asked = {"stream": rng.random() < 0.5, "max_tokens": rng.choice((1, 20, 400)), "n": rng.choice((1, 1, 1, 2))}
        body = {"model": "large", "messages": [{"role": "user", "content": text}], **asked}
        self.ask = chat_ask(body, {"x-pointsman-explain": "1", **headers})
        self.is_answered = False
        self.hangs_up_after = rng.choice((*[None] * 8, 0, 1))
        self.heard: list[Delta] = []
        self.why: list[Explanation] = []
        self.began_at = asyncio.get_running_loop().time()

    async def read(self, held: Held) -> object:
        return self.ask

    def limited(self, standing: object) -> None:
        pass

    def explain(self, index: int, explanation: Explanation) -> None:
        self.why.append(explanation)

    def place(self, index: int, placement: Placement) -> None:
        assert self.why[-1].chosen == placement.backend, "it is explained otherwise than it was decided"
        pools = placement.request.pools
        assert pools is None or placement.pool in pools, "it went where its rule does not let it"
        assert self.priority is None or placement.pool == "own", "a class without steps was spilled"

    async def write(self, index: int, delta: Delta) -> None:
        if self.hangs_up_after is not None and len(self.heard) >= self.hangs_up_after:
            raise CallerGone
        self.heard.append(delta)

    def has_seen(self, index: int) -> bool:
        return any(delta.text for delta in self.heard)

    async def live(self, gateway: Gateway) -> None:
        try:
            await serve(self, gateway)  # type: ignore[arg-type]
        except CallerGone:
            pass
        except ExpectedError as error:
            if error.code == "internal":
                raise
        else:
            ends = [delta.finish_reason for delta in self.heard if delta.finish_reason is not None]
            assert ends == ["stop"], "it has no whole answer"
            self.is_answered = True
        assert asyncio.get_running_loop().time() - self.began_at < SLOWEST_S


async def storm(gateway: Gateway, machines: dict[str, Machine], rng: random.Random) -> None:
    """Deaths, drains, joins, leaves and files, one after the other; in the end all are well."""
    cluster, removals = gateway.cluster, []
    for number in range(50):
        await asyncio.sleep(rng.uniform(0.05, 0.6))
        name = rng.choice(list(machines))
        match rng.randrange(7):
            case 0:
                machines[name].die()
            case 1 | 2 if not machines[name].is_well:
                machines[name].revive()
            case 3:
                cluster.drain(name, draining=rng.random() < 0.5)
            case 4 if len(machines) < 7:
                joiner = machines[f"own-1{number}"] = a_machine(rng, f"own-1{number}")
                await cluster.add(joiner)
            case 5 if len(machines) > 4 and name.startswith("own"):
                del machines[name]
                removals.append(asyncio.create_task(cluster.remove(name, within_s=rng.choice((0.0, 0.5, 5.0)))))
            case 6:
                gateway.config = a_file(rng)
                gateway.dispatcher.follow(gateway.config)
    for name, machine in machines.items():
        if not machine.is_well:
            machine.revive()
        cluster.drain(name, draining=False)
    await asyncio.gather(*removals)


@pytest.mark.parametrize("seed", range(4))
def test_whatever_happens_at_once_each_request_ends_by_its_rules_and_nothing_is_left(seed: int) -> None:
    async def run() -> None:
        rng, loop = random.Random(seed), asyncio.get_running_loop()
        machines = {
            name: a_machine(rng, name) for name in ("own-0", "own-1", "own-2", "far-0", "odd-0")[rng.randrange(3) :]
        }
        gateway = built(
            a_file(rng), backends=lambda _: list(machines.values()), clock=loop.time, rng=rng, health=RULES
        ).gateway
        async with gateway.cluster, asyncio.TaskGroup() as group:
            await asyncio.sleep(0.3)
            blowing = group.create_task(storm(gateway, machines, rng))
            askers: list[Asker] = []
            while not blowing.done():
                askers.append(Asker(len(askers), rng))
                call = group.create_task(askers[-1].live(gateway))
                if rng.random() < 0.1:
                    loop.call_later(4 * rng.random(), call.cancel)
                await asyncio.sleep(rng.expovariate(rng.choice((4, 60))))
                gateway.dispatcher.check()
        await gateway.tokenizers.close()
        gateway.check()
        assert len(askers) > 50
        assert sum(asker.is_answered for asker in askers) > len(askers) // 10

    run_virtually(run())
