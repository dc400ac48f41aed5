"""A real vLLM without its tokenizer at the router: lengths are estimated, and no prompt that fits is refused."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

import pytest

from shards.bundled import NAME
from tests.engines.routed import Client, a_router, pool_of
from tests.policies.learning.prompt_texts import Written, as_bundled, bundled, prompts
from tests.router.parts import board_of

if TYPE_CHECKING:
    from tests.engines.conftest import Engines
    from tests.engines.programs import VLLM

FIRST, MEASURED = 50, 60
CONTEXT = 2560


def untokenized(vllm: VLLM) -> dict[str, Any]:
    """A pool of it in which all lengths are estimated."""
    return {**pool_of(vllm), "tokenizer": "none"}


def prompts_that_fit(count: int, seed: int) -> list[Written]:
    """So many prompts of all kinds, each of which leaves the engine a token for its answer."""
    count_tokens = bundled()
    written = prompts(2 * count, seed, most=1800)
    return [each for each in written if as_bundled(each, count_tokens) < CONTEXT][:count]


def a_body(written: Written) -> dict[str, Any]:
    tools = {"tools": list(written.tools), "tool_choice": "none"} if written.tools else {}
    return {"model": NAME, "messages": list(written.messages), "max_tokens": 1, **tools}


async def test_after_fifty_answers_the_median_error_is_below_five_percent(engines: Engines) -> None:
    (vllm,) = engines.vllm("a")
    errors: list[tuple[str, float]] = []
    inside = 0
    async with a_router(untokenized(vllm)) as (client, router):
        for number, written in enumerate(prompts_that_fit(FIRST + MEASURED, seed=21)):
            status, reply = await client.post("/v1/chat/completions", a_body(written))
            assert status == 200, reply
            *_, row = board_of(router).rows()
            asked = row.asked
            assert asked is not None
            tokens, likely = reply["usage"]["prompt_tokens"], asked.likely_prompt_tokens
            assert likely is not None, "it was counted"
            assert asked.surely_tokens <= tokens
            if number >= FIRST:
                errors.append((written.kind, abs(asked.prompt_tokens / tokens - 1.0)))
                inside += likely[0] <= tokens <= likely[1]
        router.check()
    found = {kind: [error for name, error in errors if name == kind] for kind, _ in errors}
    print(*(f"{kind} {statistics.median(some):.1%} of {len(some)}" for kind, some in sorted(found.items())), sep=", ")
    print(f"all {statistics.median(error for _, error in errors):.1%}, in interval {inside / MEASURED:.0%}")
    assert statistics.median(error for _, error in errors) < 0.05
    assert inside > 0.7 * MEASURED


@pytest.mark.parametrize(
    ("word", "counts"),
    [(" document", (1500, 2400, 2600)), ("的", (700, 830, 900)), ("a1-", (500, 900))],
    ids=["words", "ideographs", "symbols"],
)
async def test_the_engine_alone_decides_whether_a_prompt_fits(
    engines: Engines, word: str, counts: tuple[int, ...]
) -> None:
    (vllm,) = engines.vllm("a")
    async with a_router(untokenized(vllm)) as (client, router):
        itself = Client(client.http, vllm.url)
        for count in counts:
            body = {"model": NAME, "messages": [{"role": "user", "content": word * count}], "max_tokens": 1}
            expected, theirs = await itself.post("/v1/chat/completions", body)
            status, reply = await client.post("/v1/chat/completions", body)
            assert status == expected, reply
            if status == 400:
                assert reply["error"]["code"] == "context_length_exceeded"
                assert str(CONTEXT) in reply["error"]["message"], "the engine's own words"
                assert str(CONTEXT) in theirs["error"]["message"]
        router.check()
