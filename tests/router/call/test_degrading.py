"""Requests that are degraded keep the limits that their tenant has of the model that answers them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from backends.fake import Answer, FakeBackend
from policies.quota.budget import Descriptor
from policies.sla.parse import parse
from router.call.gateway import Gateway
from router.call.pipeline import serve
from router.protocols.openai.request import chat_ask
from tests.router.callers import Listener, ended
from tests.router.parts import built

FILE = """
classes: {{interactive: {{}}}}
tenants: {{acme: {{anonymous: true, models: {models}, limits: {{{limits}}}}}}}
rules: [{{class: interactive}}]
on_miss: {{interactive: [{{degrade: small}}]}}
pools:
  large: {{kind: fake, at: ['l:1'], model: large}}
  small: {{kind: fake, at: ['s:1'], model: small}}
queue: {{outage: 20ms}}
"""
ANSWER = Answer(("a", "b", "c"))


@asynccontextmanager
async def a_gateway(limits: str = "", models: str = "[large, small]") -> AsyncIterator[tuple[Gateway, FakeBackend]]:
    """The large model is away, and the small one is what it is degraded to."""
    large = FakeBackend("large-0", "large", models=frozenset({"large"}))
    small = FakeBackend("small-0", "small", ANSWER, models=frozenset({"small"}))
    config = parse(FILE.format(limits=limits, models=models))
    gateway = built(config, backends=lambda _: (large, small), rng=random.Random(1)).gateway
    for backend in (large, small):
        assert await gateway.cluster.probe(backend.name)
    gateway.cluster.drain(large.name)
    yield gateway, small
    await gateway.tokenizers.close()
    gateway.check()
    assert gateway.admission.is_idle()
    assert gateway.dispatcher.is_idle()


async def left_of(gateway: Gateway, model: str) -> int:
    anonymous = gateway.config.anonymous
    assert anonymous is not None
    limits = Descriptor(anonymous.name, anonymous.model_limits[model], model)
    tokens = (await gateway.admission.store.standing((limits,))).tokens
    assert tokens is not None
    return tokens.remaining


def a_call(id: str = "r1") -> Listener:  # noqa: A002
    body = {"model": "large", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
    caller = Listener(chat_ask(body), key=None)
    caller.id = id
    return caller


async def test_the_limits_of_the_model_that_answers_hold() -> None:
    async with a_gateway("models: {small: {requests_per_minute: 2}}") as (gateway, small):
        outcomes = [await ended(a_call(name), gateway) for name in ("r1", "r2", "r3")]
    assert [getattr(error, "code", None) for error in outcomes] == [None, None, "no_backend"]
    assert len(small.received) == 2


async def test_what_it_used_is_charged_to_both_models() -> None:
    limits = "models: {small: {tokens_per_minute: 1000}, large: {tokens_per_minute: 2000}}"
    async with a_gateway(limits) as (gateway, small):
        await serve(a_call(), gateway)
        used = [most - await left_of(gateway, model) for model, most in (("large", 2000), ("small", 1000))]
        prompt_tokens = small.received[0][0].prompt_tokens
    assert [request.model for request, _ in small.received] == ["small"]
    # a little of it has come back by now
    assert used == [pytest.approx(prompt_tokens + len(ANSWER.texts), abs=2)] * 2


async def test_as_many_run_at_once_as_the_model_allows() -> None:
    async with a_gateway("models: {small: {concurrent: 1}}") as (gateway, small):
        small.script = Answer(("a",), delay_s=0.05)
        outcomes = await asyncio.gather(*(ended(a_call(name), gateway) for name in ("r1", "r2")))
    assert sorted(getattr(error, "code", "answered") for error in outcomes) == ["answered", "no_backend"]


@pytest.mark.parametrize(("models", "code"), [("[large]", "no_backend"), ("[large, small]", None)])
async def test_a_model_that_the_tenant_may_not_use_answers_nothing(models: str, code: str | None) -> None:
    async with a_gateway(models=models) as (gateway, _):
        assert getattr(await ended(a_call(), gateway), "code", None) == code
