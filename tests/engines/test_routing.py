"""Two real vLLM: prompts go to the cache that holds their beginning."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import pytest

from shards.bundled.documents import prompt
from tests.engines.routed import a_document, a_router, pool_of

if TYPE_CHECKING:
    from tests.engines.conftest import Engines


@pytest.mark.parametrize("events", [True, False], ids=["with events", "without events"])
async def test_a_document_is_computed_once_and_both_engines_get_some(engines: Engines, events: bool) -> None:
    vllms = engines.vllm("a", "b")
    pool = pool_of(*vllms)
    if not events:
        pool["options"] = {"events": "none"}
    documents = [a_document(seed) for seed in range(100, 108)]
    homes: dict[int, set[str]] = defaultdict(set)
    async with a_router(pool) as (client, router):
        for turn in range(3):
            for number, about in enumerate(documents):
                answer = await client.chat(prompt(about.text, about.questions[turn].question))
                assert about.questions[turn].needle in answer.text
                homes[number].add(answer.backend)
                if turn:
                    assert answer.cached_tokens >= 0.8 * answer.usage["prompt_tokens"]
        router.check()
    assert all(len(names) == 1 for names in homes.values()), homes
    assert len(set.union(*homes.values())) == 2
