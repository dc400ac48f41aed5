"""Many requests at once on a new document: two are sent, the others wait for a first token, and then go anywhere."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence

import pytest

from policies.errors import BackendFailed
from policies.nouns import Delta, Prompt, Request
from router.call.gateway import Gateway
from router.protocols.openai.request import chat_ask
from router.start.build import build
from tests.router.callers import Listener, ended, well
from tests.router.parts import KEY, ScriptedBackend, Step, a_chat, a_config, a_tenant, an_answer
from tests.shards.attached import eventually

DOCUMENT = "the quick brown fox jumps over the lazy dog " * 250
OK = tuple(an_answer("o", "k"))


class Burst:
    """Four backends, of which the first two that are asked answer `first` and `second`, and all others `later`."""

    def __init__(
        self, first: list[Step], second: list[Step], later: Sequence[Step] = OK, *, domain: str | None = None
    ) -> None:
        self._first = [second, first]
        self._later = later
        self.backends = [Next(f"b{number}", burst=self) for number in range(4)]
        config = a_config(a_tenant("acme"), a_tenant("labs", "labs-key", domain=domain or "labs"))
        # predictions do not depend on how busy the machine is
        frozen = build(config, backends=lambda _: self.backends, rng=random.Random(1), clock=lambda: 1000.0)
        self.gateway = frozen.gateway

    @property
    def sent(self) -> int:
        return sum(len(backend.requests) for backend in self.backends)

    @property
    def waiting(self) -> int:
        return sum(self.gateway.dispatcher.waiting()[0].values())

    def script(self) -> list[Step]:
        return [*(self._first.pop() if self._first else self._later)]

    async def are_asked(self, *texts: str, key: str = KEY) -> list[asyncio.Task[BaseException | None]]:
        """Callers that ask `texts`; the first of all is at a backend, and every one is there or waits."""
        before = self.sent + self.waiting
        callers = [Listener(chat_ask(a_chat(text)), key=key) for text in texts]
        for caller in callers:
            caller.id = next(self.gateway.ids)
        tasks = [asyncio.create_task(ended(caller, self.gateway)) for caller in callers]
        await eventually(lambda: self.sent + self.waiting == before + len(texts))
        return tasks


class Next(ScriptedBackend):
    """Answers with the next script of the burst."""

    def __init__(self, name: str, *, burst: Burst) -> None:
        super().__init__(name)
        self._burst = burst

    async def generate(self, request: Request, prompt: Prompt) -> AsyncIterator[Delta]:
        self.scripts = [self._burst.script()]
        async for delta in super().generate(request, prompt):
            yield delta


async def a_burst(first: list[Step], second: list[Step], later: Sequence[Step] = OK) -> tuple[Burst, Gateway]:
    burst = Burst(first, second, later)
    return burst, await well(burst.gateway, *(backend.name for backend in burst.backends))


def questions(count: int) -> list[str]:
    return [f"{DOCUMENT} {number}?" for number in range(count)]


async def test_two_of_many_are_sent_and_the_others_follow_at_a_first_token() -> None:
    computed, first_token = asyncio.Event(), Delta(text="o", token_ids=(1,))
    rest = asyncio.Event()
    burst, gateway = await a_burst([computed, first_token, rest, *an_answer("k")], [rest, *an_answer("ok")])
    tasks = await burst.are_asked(*questions(8))
    assert (burst.sent, burst.waiting) == (2, 6)
    (bid, *_) = [bid for queue in gateway.dispatcher._queues.values() for bid in queue.bids.values()]
    assert bid.awaits in {backend.name for backend in burst.backends if backend.requests}
    computed.set()
    await eventually(lambda: burst.sent == 8)
    rest.set()
    assert await asyncio.gather(*tasks) == [None] * 8
    gateway.check()


async def test_if_it_fails_it_goes_elsewhere_and_the_rest_waits_on() -> None:
    fails, computed = asyncio.Event(), asyncio.Event()
    computing: list[Step] = [computed, *an_answer("ok")]
    burst, gateway = await a_burst([fails, BackendFailed("it broke")], computing, computing)
    tasks = await burst.are_asked(*questions(5))
    assert (burst.sent, burst.waiting) == (2, 3)
    fails.set()
    # it may not return to the backend that failed it, where another one may go
    await eventually(lambda: burst.sent >= 3)
    assert burst.waiting >= 2
    computed.set()
    assert await asyncio.gather(*tasks) == [None] * 5
    gateway.check()


async def test_a_caller_that_leaves_while_it_waits_leaves_nothing() -> None:
    computed = asyncio.Event()
    computing: list[Step] = [computed, *an_answer("ok")]
    burst, gateway = await a_burst(computing, computing)
    first, second = await burst.are_asked(*questions(2))
    leaves, stays = await burst.are_asked(*questions(2))
    leaves.cancel()
    assert isinstance(await leaves, asyncio.CancelledError)
    assert burst.waiting == 1
    computed.set()
    assert await asyncio.gather(first, second, stays) == [None] * 3
    assert burst.sent == 3
    gateway.check()


async def test_other_prompts_do_not_wait() -> None:
    computed = asyncio.Event()
    computing: list[Step] = [computed, *an_answer("ok")]
    burst, gateway = await a_burst(computing, computing)
    tasks = await burst.are_asked(*questions(3))
    tasks += await burst.are_asked("a " + DOCUMENT, "hello")
    await eventually(lambda: burst.sent == 4)
    assert burst.waiting == 1
    computed.set()
    assert await asyncio.gather(*tasks) == [None] * 5
    gateway.check()


@pytest.mark.parametrize("domain", ["labs", "acme"])
async def test_only_tenants_that_share_their_cache_wait_for_each_other(domain: str) -> None:
    computed = asyncio.Event()
    computing: list[Step] = [computed, *an_answer("ok")]
    burst = Burst(computing, computing, domain=domain)
    gateway = await well(burst.gateway, *(backend.name for backend in burst.backends))
    tasks = await burst.are_asked(*questions(2))
    tasks += await burst.are_asked(questions(1)[0], key="labs-key")
    assert (burst.sent, burst.waiting) == ((2, 1) if domain == "acme" else (3, 0))
    computed.set()
    assert await asyncio.gather(*tasks) == [None] * 3
    gateway.check()
