"""What one tenant has sent shows in nothing that another can see: not in places, figures, predictions or work.

How much work backends had lately is no secret: queues and scores show it to every tenant that asks for an explanation.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from backends.base import CacheListener
from policies.explain import Explanation
from policies.nouns import Usage
from router.call.gateway import Gateway
from router.call.pipeline import serve
from router.protocols.openai.request import chat_ask
from tests.router.callers import Listener, well
from tests.router.parts import ScriptedBackend, a_chat, a_config, a_tenant, an_answer, built

DOCUMENT = "the quick brown fox\n" * 600
ANOTHER = "the brown quick fox\n" + DOCUMENT[20:]
"""As long as DOCUMENT, and begins otherwise."""


class Telling(ScriptedBackend):
    """A backend that tells at once of every block that it computed, under the names that its requests came with."""

    listener: CacheListener

    async def generate(self, request: Any, prompt: Any) -> Any:
        held = sum(1 for key in request.block_keys if key in self.held)
        self.scripts = [an_answer("ok", usage=Usage(request.prompt_tokens, 1, 64 * held))]
        async for delta in super().generate(request, prompt):
            yield delta
        self.held |= set(request.block_keys)
        self.listener.store(self.name, request.block_keys)


async def a_world(*, shared: bool = False) -> tuple[Gateway, list[Telling]]:
    domain = {"domain": "both"} if shared else {}
    tenants = (a_tenant("acme", "acme-key", **domain), a_tenant("labs", "labs-key", **domain))
    backends = [Telling(f"b{number}") for number in range(4)]

    def make(listener: CacheListener) -> list[Telling]:
        for backend in backends:
            backend.listener, backend.held = listener, set()  # type: ignore[attr-defined]
        return backends

    gateway = built(a_config(*tenants), backends=make, rng=random.Random(3), clock=lambda: 1.0).gateway
    return await well(gateway, *(backend.name for backend in backends)), backends


async def asked(gateway: Gateway, key: str, document: str = DOCUMENT) -> tuple[Listener, Explanation]:
    listener = Listener(chat_ask(a_chat(document), {"x-pointsman-explain": "1"}), key=key)
    await serve(listener, gateway)
    return listener, listener.why[0]


def visible(listener: Listener, why: Explanation) -> Any:
    """All that its answer tells a client, but for names and draws between equals."""
    blank = replace(why, request="", tenant="", equals=(), chosen=None, candidates=())
    rows = [(candidate.held_tokens, candidate.scores, candidate.total) for candidate in why.candidates]
    return blank, rows, listener.heard[-1].usage


@pytest.mark.parametrize("others", [0, 1, 3])
async def test_a_document_that_another_tenant_has_cached_is_as_cold_as_a_new_one(others: int) -> None:
    # both worlds had the same work, which scores may show; only the documents differ
    cold_world, _ = await a_world()
    for _ in range(others):
        _, other = await asked(cold_world, "acme-key", ANOTHER)
    cold = visible(*await asked(cold_world, "labs-key"))
    world, backends = await a_world()
    for _ in range(others):
        _, same = await asked(world, "acme-key")
        assert same.prompt_tokens == other.prompt_tokens
    assert visible(*await asked(world, "labs-key")) == cold
    # and the tokenizer works for it as it did the first time
    keys = {request.tenant: set(request.block_keys) for backend in backends for request in backend.requests}
    assert not keys.get("acme", set()) & keys["labs"]
    for gateway in (cold_world, world):
        await gateway.tokenizers.close()


async def test_tenants_with_joined_domains_share() -> None:
    world, _ = await a_world(shared=True)
    await asked(world, "acme-key")
    listener, why = await asked(world, "labs-key")
    assert why.uncached_tokens < why.prompt_tokens / 10
    usage = listener.heard[-1].usage
    assert usage is not None
    assert usage.cached_tokens > 0
    await world.tokenizers.close()
