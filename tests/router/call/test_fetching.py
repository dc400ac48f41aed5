"""A request at a backend that fetches KV of its prompt from another one, however that ends."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

from msgspec.structs import replace as with_fields

from backends.base import Load
from backends.fake import Answer
from policies.errors import BackendFailed, ExpectedError
from policies.nouns import Prompt, Request
from router.call.carrier import Carrier, Ourselves
from router.call.disclosure import shown_name
from router.call.gateway import Gateway
from router.call.pipeline import serve
from router.protocols.explanations import as_header, as_text
from router.protocols.openai.request import chat_ask
from tests.router.callers import Listener, well
from tests.router.lenders import Lending
from tests.router.parts import MODEL, a_chat, a_config, built
from tests.virtual_time import run_virtually

LONG = "word " * 8000
FREE = Load(running=0, waiting=0, waiting_tokens=0, reported_at=0.0)
BUSY = Load(running=30, waiting=20, waiting_tokens=10_000_000, reported_at=0.0)
TEXT = "Hello, world."


class World:
    """A gateway in virtual time with backends of one group, all free."""

    def __init__(self, count: int = 3) -> None:
        self.backends = [Lending(f"b{at}", models=frozenset({MODEL}), reported=FREE) for at in range(count)]
        clock = asyncio.get_running_loop().time
        self.gateway: Gateway = built(
            a_config(), backends=lambda _: self.backends, rng=random.Random(1), clock=clock
        ).gateway

    async def ask(self, text: str = LONG, carrier: Carrier | None = None) -> tuple[Listener, BaseException | None]:
        """Send a request: its client, and how it ended."""
        await well(self.gateway, *(backend.name for backend in self.backends))
        caller = Listener(with_fields(chat_ask(a_chat(text, stream=True)), explain=True))
        try:
            await serve(caller, self.gateway, carrier)
        except ExpectedError as error:
            return caller, error
        return caller, None

    async def holder(self) -> Lending:
        """The backend that answered LONG, and is busy from now on."""
        caller, _ = await self.ask()
        holder = next(backend for backend in self.backends if [backend.name] == caller.placed)
        for backend in self.backends:
            backend.received.clear()
        holder.reported = BUSY
        return holder

    @property
    def received(self) -> list[Prompt]:
        return [prompt for backend in self.backends for _, prompt in backend.received]

    async def close(self) -> None:
        """Assert that nothing is left anywhere."""
        self.gateway.check()
        for backend in self.backends:
            assert backend.open_requests == 0, backend
        await self.gateway.tokenizers.close()


def virtually(scenario: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def test() -> None:
        run_virtually(scenario())

    test.__name__, test.__doc__ = scenario.__name__, scenario.__doc__
    return test


def text_of(caller: Listener) -> str:
    return "".join(delta.text for delta in caller.heard)


@virtually
async def test_a_free_backend_fetches_what_a_busy_one_holds() -> None:
    world = World()
    holder = await world.holder()
    caller, error = await world.ask()
    assert (error, text_of(caller)) == (None, TEXT)
    assert caller.placed != [holder.name]
    (why,), (prompt,) = caller.why, world.received
    assert why.fetch is not None
    assert why.fetch.backend == holder.name
    assert why.fetch.seconds < why.fetch.computing_s
    assert prompt.transfer == {"from": holder.name, "tokens": why.fetch.tokens}
    assert why.fetch.tokens <= why.prompt_tokens
    await world.close()


@virtually
async def test_where_it_was_fetched_it_is_held_from_then_on() -> None:
    world = World()
    await world.holder()
    first, _ = await world.ask()
    second, _ = await world.ask()
    assert second.placed == first.placed
    assert second.why[0].fetch is None
    await world.close()


@virtually
async def test_the_first_request_and_another_prompt_fetch_nothing() -> None:
    world = World()
    await world.holder()
    caller, _ = await world.ask("other " * 8000)
    assert (caller.why[0].fetch, world.received[0].transfer) == (None, None)
    await world.close()


@virtually
async def test_what_cannot_be_lent_any_more_is_computed() -> None:
    world = World()
    holder = await world.holder()
    holder.lends = False
    caller, error = await world.ask()
    assert (error, text_of(caller)) == (None, TEXT)
    assert [prompt.transfer for prompt in world.received] == [None]
    await world.close()


@virtually
async def test_backends_of_different_groups_fetch_nothing() -> None:
    world = World()
    holder = await world.holder()
    holder.kv_group = "70b"
    caller, error = await world.ask()
    assert (error, caller.why[0].fetch) == (None, None)
    await world.close()


@virtually
async def test_after_a_failure_the_prompt_is_computed_without_a_fetch() -> None:
    world = World()
    holder = await world.holder()

    def script(_: Request, prompt: Prompt) -> Answer:
        return Answer(error=BackendFailed("broke off")) if prompt.transfer else Answer()

    for backend in world.backends:
        if backend is not holder:
            backend.script = script
    caller, error = await world.ask()
    assert (error, text_of(caller)) == (None, TEXT)
    first, second = world.received
    assert sorted([first.transfer is None, second.transfer is None]) == [False, True]
    assert len(set(caller.placed)) == 2
    await world.close()


class Elsewhere(Ourselves):
    """A carrier that cannot tell a backend where to fetch."""

    continues = False


@virtually
async def test_a_gateway_that_carries_requests_itself_fetches_nothing() -> None:
    world = World()
    await world.holder()
    caller, error = await world.ask(carrier=Elsewhere())
    assert (error, text_of(caller), caller.why[0].fetch) == (None, TEXT, None)
    await world.close()


@virtually
async def test_tenants_see_no_backends_names_in_an_explanation() -> None:
    world = World()
    holder = await world.holder()
    caller, _ = await world.ask()
    (why,) = caller.why
    assert why.fetch is not None
    text = as_text(why)
    assert f"fetch     {why.fetch.tokens:,} of {why.prompt_tokens:,} tokens from {shown_name(holder.name)} in " in text
    assert f" s instead of computing them in {why.fetch.computing_s:.3g} s" in text
    assert '"fetch"' in as_header(why)
    await world.close()
