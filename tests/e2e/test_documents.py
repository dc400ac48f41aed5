"""The same documents in another order: computed anew if the order is fixed, found in the cache if it is free."""

from __future__ import annotations

import json
import random
from typing import Any

import aiohttp

from shards.bundled.documents import Document, document, facts_within
from shards.engine import EngineOptions
from tests.e2e.cluster import KEYS, MODEL, Whole, a_whole


def some_documents(count: int) -> list[Document]:
    """Documents of about 150 tokens."""
    rng = random.Random(4)
    return [document(rng, facts_within(150)) for _ in range(count)]


async def asked(whole: Whole, documents: list[dict[str, Any]], question: str, **fields: Any) -> tuple[str, Any, Any]:
    """The answer's text, its usage, and the order of its documents."""
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": question}],
        "documents": documents,
        "max_tokens": 24,
        "temperature": 0,
        **fields,
    }
    headers = {"Authorization": f"Bearer {KEYS['acme']}"}
    url = f"{whole.router.http_url}/v1/chat/completions"
    async with aiohttp.ClientSession() as http, http.post(url, json=body, headers=headers) as reply:
        assert reply.status == 200, await reply.text()
        answer = await reply.json()
        order = json.loads(reply.headers["x-pointsman-document-order"])
        return answer["choices"][0]["message"]["content"], answer["usage"], order


async def test_documents_in_another_order_are_cached_if_the_order_is_free() -> None:
    found = some_documents(6)
    documents = [{"id": f"d{number}", "text": about.text} for number, about in enumerate(found)]
    asked_about = found[2].questions[0]
    question = f"Question: {asked_about.question}"
    async with a_whole(2, options=EngineOptions(kv_blocks=512)) as whole:
        first, usage, order = await asked(whole, documents, question)
        assert order == [f"d{number}" for number in range(6)]
        assert usage["prompt_tokens"] > 700
        shuffled = [documents[place] for place in (5, 2, 0, 4, 1, 3)]
        _, free, order = await asked(whole, shuffled, question, document_order="any")
        assert order == [f"d{number}" for number in range(6)]
        # nothing but the last block, which is not full, was computed
        assert free["prompt_tokens"] - free["prompt_tokens_details"]["cached_tokens"] <= 64
        _, fixed, order = await asked(whole, shuffled, question)
        assert order == ["d5", "d2", "d0", "d4", "d1", "d3"]
        assert fixed["prompt_tokens_details"]["cached_tokens"] <= 64
        again, _, _ = await asked(whole, shuffled, question, document_order="any")
        assert again == first
        assert asked_about.answer in first
        await whole.check_idle()


async def test_documents_at_other_places_are_blended_if_the_client_permits_it_and_never_serve_another_request() -> None:
    found = some_documents(6)
    documents = [{"id": f"d{number}", "text": about.text} for number, about in enumerate(found)]
    shuffled = [documents[place] for place in (5, 2, 0, 4, 1, 3)]
    asked_about = found[2].questions[0]
    question = f"Question: {asked_about.question}"
    async with a_whole(1, options=EngineOptions(kv_blocks=512)) as whole:
        _, usage, _ = await asked(whole, documents, question, reuse="chunks")
        assert "blended_tokens" not in usage["prompt_tokens_details"]
        answer, usage, _ = await asked(whole, shuffled, question, reuse="chunks")
        details = usage["prompt_tokens_details"]
        assert details["blended_tokens"] > 0.75 * usage["prompt_tokens"]
        assert details["cached_tokens"] <= 64
        assert asked_about.answer in answer
        answer, usage, _ = await asked(whole, shuffled, question)
        assert usage["prompt_tokens_details"]["cached_tokens"] <= 64
        assert "blended_tokens" not in usage["prompt_tokens_details"]
        assert asked_about.answer in answer
        await whole.check_idle()


async def test_a_blended_request_goes_to_the_shard_that_holds_its_documents() -> None:
    found = some_documents(6)
    documents = [{"id": f"d{number}", "text": about.text} for number, about in enumerate(found)]
    question = f"Question: {found[0].questions[0].question}"
    async with a_whole(3, options=EngineOptions(kv_blocks=512)) as whole:
        for half in (documents[:3], documents[3:]):
            await asked(whole, half, question, reuse="chunks")
        for places in ((2, 0, 1), (5, 3, 4), (1, 2, 0), (4, 3, 5)):
            _, usage, _ = await asked(whole, [documents[place] for place in places], question, reuse="chunks")
            assert usage["prompt_tokens_details"]["blended_tokens"] > 0.7 * usage["prompt_tokens"]
        await whole.check_idle()
