"""Cache events of a real vLLM count where they agree with the prompts that the router computes, and only there."""

from __future__ import annotations

import asyncio
import json
import random
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import aiohttp

from policies.prefix.parity import Doubt, Trust
from router.fleet.feeds.health import FeedState
from router.fleet.prompt_keys import PromptKeys
from router.start.app import Router
from shards.bundled import NAME, weights
from shards.bundled.documents import Document, prompt
from shards.kv.keys import BLOCK_TOKENS
from tests.engines.programs import VLLM
from tests.engines.routed import Client, a_document, a_router
from tests.router.parts import board_of
from tests.shards.attached import eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from tests.engines.conftest import Engines

WRONG = "Please read this. {% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}\n{% endfor %}"


def pool(*engines: VLLM, **more: Any) -> dict[str, Any]:
    """A pool that names no events: the engines say where they publish."""
    return {"kind": "vllm", "at": [each.url for each in engines], "model": NAME, **more}


def keys_of(router: Router, number: int = -1) -> PromptKeys:
    """The keys of the prompt of the last decision."""
    asked = [row.asked for row in board_of(router).rows(0) if row.asked][number]
    return PromptKeys(asked.block_keys, asked.model, is_exact=asked.least_prompt_tokens is None)


def trust_in(router: Router) -> dict[str, Trust]:
    reports_of = router.gateway.beliefs.parity.reports_of
    return {name: report.trust for name in router.gateway.cluster.names() for report in reports_of(name)}


async def within(seconds: float, is_true: Callable[[], bool]) -> None:
    async with asyncio.timeout(seconds):
        while not is_true():  # noqa: ASYNC110 - an engine announces nothing
            await asyncio.sleep(0.05)


async def ask(client: Client, order: Sequence[Document], *, at_once: int = 3) -> int:
    """Ask a question on each of these documents, in this order; how many were answered."""
    rng, answered, rest = random.Random(1), 0, iter(order)

    async def asker() -> None:
        nonlocal answered
        for about in rest:
            await client.chat(prompt(about.text, rng.choice(about.questions).question), max_tokens=4)
            answered += 1

    await asyncio.gather(*(asker() for _ in range(at_once)))
    return answered


def any_of(documents: Sequence[Document], count: int) -> list[Document]:
    """So many at random, the same each time."""
    return random.Random(2).choices(documents, k=count)


def hit_rate(engines: list[VLLM], before: list[tuple[float, float]]) -> float:
    """By the engines' own counters, since `before`."""
    hits, asked = map(sum, zip(*[counted(engine) for engine in engines], strict=True))
    hits_before, asked_before = map(sum, zip(*before, strict=True))
    return (hits - hits_before) / (asked - asked_before)


def counted(vllm: VLLM) -> tuple[float, float]:
    return vllm.metric("vllm:prefix_cache_hits_total"), vllm.metric("vllm:prefix_cache_queries_total")


async def test_a_long_prompt_is_known_to_be_cached_while_the_feed_is_believed_alone(engines: Engines) -> None:
    (vllm,) = engines.vllm("a")
    async with a_router(pool(vllm)) as (client, router):
        beliefs = router.gateway.beliefs
        long = a_document(11, tokens=2250)
        text = prompt(long.text, long.questions[0].question)
        # the first answer brings the first event, and with it the size of the engine's blocks
        for seed in range(20, 26):
            await ask(client, [a_document(seed, tokens=200)])
            await eventually(lambda: [feed.state for feed in router.gateway.feeds.health()] == [FeedState.LIVE])
            await eventually(lambda: beliefs.is_live("engines-0"))
        await within(10, lambda: trust_in(router) == {"engines-0": Trust.PROVEN})
        answer = await client.chat(text, max_tokens=4)
        assert answer.usage["prompt_tokens"] > 2000
        assert answer.cached_tokens == 0
        # what was just sent is believed for a moment too: this is what events tell
        matches = beliefs.index.longest(keys_of(router).keys)
        assert [match.blocks for match in matches.values()] == [answer.usage["prompt_tokens"] // BLOCK_TOKENS]
        again = await client.chat(text, max_tokens=4)
        assert again.cached_tokens >= answer.usage["prompt_tokens"] - 64
        router.check()


async def test_events_of_an_engine_that_is_sent_no_salt_are_proven_too(engines: Engines) -> None:
    (vllm,) = engines.vllm("a")
    # another router has sent it salts, of which its history of events tells
    async with a_router(pool(vllm)) as (client, _):
        await ask(client, [a_document(30, tokens=200)])
    async with a_router(pool(vllm, options={"cache_salt": "false"})) as (client, router):
        await ask(client, [a_document(30, tokens=200)])
        await within(10, lambda: router.gateway.beliefs.is_live("engines-0"))
        await ask(client, [a_document(seed, tokens=200) for seed in range(31, 37)], at_once=1)
        await within(10, lambda: trust_in(router) == {"engines-0": Trust.PROVEN})
        again = await client.chat(prompt((about := a_document(36, tokens=200)).text, about.questions[0].question))
        assert again.cached_tokens >= 128
        router.check()


async def test_of_what_an_engine_has_cached_since_before_it_was_heard_nothing_is_held_against_its_events(
    engines: Engines,
) -> None:
    (vllm,) = engines.vllm("a")
    old = [a_document(seed, tokens=400) for seed in range(40, 50)]
    async with a_router(pool(vllm)) as (client, _):
        await ask(client, old)
    # without a replay, a router hears only what is stored from now on
    unheard = pool(vllm, options={"events": [vllm.events]})
    async with a_router(unheard) as (client, router):
        beliefs = router.gateway.beliefs
        # events that are published before the subscription has reached the engine are lost
        for seed in range(50, 60):
            await ask(client, [a_document(250 + seed, tokens=200)])
            with suppress(TimeoutError):
                await within(1, lambda: beliefs.is_live("engines-0"))
                break
        assert beliefs.is_live("engines-0")
        await ask(client, old, at_once=1)
        # events of blocks may take 3 s
        await within(
            10, lambda: [report.doubt for report in beliefs.parity.reports_of("engines-0")] == [Doubt.UNREPORTED]
        )
        assert trust_in(router) == {"engines-0": Trust.UNPROVEN}
        vllm.forget_prefixes()
        await ask(client, [*old, *(a_document(seed, tokens=200) for seed in range(51, 63))], at_once=1)
        await within(10, lambda: trust_in(router) == {"engines-0": Trust.PROVEN})
        router.check()


async def test_a_wrong_template_is_found_out_and_costs_no_hits_and_the_corrected_one_brings_the_feed_back(
    engines: Engines, tmp_path: Path
) -> None:
    pair = engines.vllm("a", "b")
    documents = [a_document(seed, tokens=900) for seed in range(24)]
    template = tmp_path / "template.jinja"
    template.write_text(WRONG)
    rates = {}
    for name, options in (("without a feed", {"events": "none"}), ("with one", {})):
        for vllm in pair:
            vllm.forget_prefixes()
        async with a_router(pool(*pair, chat_template=str(template), options=options)) as (client, router):
            await ask(client, documents[:1] * 20)
            if name == "with one":
                assert Trust.BROKEN in trust_in(router).values()
            await ask(client, documents)
            before = [counted(vllm) for vllm in pair]
            assert await ask(client, any_of(documents, 120)) == 120
            rates[name] = hit_rate(pair, before)
            if name == "with one":
                assert set(trust_in(router).values()) == {Trust.BROKEN}
                template.write_text(right_template())
                # the file is looked at every 10 s
                async with asyncio.timeout(300):
                    while set(trust_in(router).values()) != {Trust.PROVEN}:
                        await ask(client, any_of(documents, 12))
                before = [counted(vllm) for vllm in pair]
                await ask(client, any_of(documents, 80))
                rates["corrected"] = hit_rate(pair, before)
            router.check()
    assert rates["with one"] >= rates["without a feed"] - 0.1, rates
    assert rates["corrected"] >= rates["without a feed"] - 0.1, rates


def right_template() -> str:
    """The bundled model's own."""
    return str(json.loads((weights() / "tokenizer_config.json").read_text())["chat_template"])


async def test_of_a_vllm_that_was_killed_and_started_again_under_load_nothing_old_is_believed_and_no_request_is_lost(
    engines: Engines,
) -> None:
    pair = engines.vllm("a", "b")
    documents = [a_document(seed, tokens=900) for seed in range(8)]
    async with a_router(pool(*pair)) as (client, router):
        beliefs = router.gateway.beliefs
        # a router is ready as soon as one of them is reached, and would send everything there
        await within(20, lambda: len(router.gateway.feeds.health()) == len(pair))
        await ask(client, documents * 5)
        prompts = {row.asked.block_keys for row in board_of(router).rows(0) if row.asked}
        assert any("engines-0" in beliefs.index.longest(keys) for keys in prompts)
        load = asyncio.create_task(ask(client, documents * 1000))
        await asyncio.sleep(1)
        pair[0].kill()
        await asyncio.sleep(2)
        assert not load.done(), "a request failed that the other one could have served"
        pair[0].start()
        await asyncio.to_thread(pair[0].wait_until_ready, 400.0)
        # the load would store what is looked for: it is not to come back before the index was looked at
        load.cancel()
        with suppress(asyncio.CancelledError):
            await load
        await within(60, router.gateway.is_ready)
        # once connected, the feed asks for what it missed, which the engine answers within 0.1 s
        heard = (FeedState.LIVE, FeedState.EMPTY)
        await within(60, lambda: all(feed.connected and feed.state in heard for feed in router.gateway.feeds.health()))
        old = [keys for keys in prompts if "engines-0" in beliefs.index.longest(keys)]
        assert not old or pair[0].metric("vllm:prefix_cache_queries_total") > 0, "the new process was asked nothing"
        async with aiohttp.ClientSession() as http:
            direct = Client(http, pair[0].url)
            for about in documents:
                # what is believed of it, and what it really has
                text = prompt(about.text, "Which is it?")
                answer = await client.chat(text, max_tokens=1)
                match = beliefs.index.longest(keys_of(router).keys).get("engines-0")
                real = await direct.chat(text, max_tokens=1, cache_salt="acme")
                assert (match.blocks * BLOCK_TOKENS if match else 0) <= real.cached_tokens + 64, answer
        router.check()
