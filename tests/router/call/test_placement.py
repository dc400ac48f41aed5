"""Where a request goes: to its prefix, among the backends that can and may take it."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from backends.base import CacheListener
from policies.errors import InvalidRequest, NoBackend, UnknownModel
from policies.nouns import Capability
from router.call.pipeline import serve
from router.protocols.openai.request import chat_ask, completion_ask
from tests.router.callers import Listener, a_gateway, ended, well
from tests.router.parts import KEY, ScriptedBackend, a_chat, a_config, a_tenant, built


async def test_a_request_goes_where_its_prefix_lives() -> None:
    listeners: list[CacheListener] = []
    backends = [ScriptedBackend(f"b{i}") for i in range(3)]

    def make(listener: CacheListener) -> list[ScriptedBackend]:
        listeners.append(listener)
        return backends

    gateway = built(a_config(), backends=make, rng=random.Random(2)).gateway
    await well(gateway, "b0", "b1", "b2")
    ask = chat_ask(a_chat("the quick brown fox " * 100))
    first = Listener(ask)
    await serve(first, gateway)
    home = first.placed[0]
    request = next(backend for backend in backends if backend.name == home).requests[0]
    assert len(request.block_keys) > 1
    listeners[0].store(home, request.block_keys)
    for _ in range(5):
        caller = Listener(ask)
        await serve(caller, gateway)
        assert caller.placed == [home]
    await gateway.tokenizers.close()


async def test_two_tenants_with_one_prompt_have_no_key_in_common() -> None:
    backend = ScriptedBackend()
    config = a_config(a_tenant("acme"), a_tenant("labs", "labs-key"), a_tenant("twin", "twin-key", domain="acme"))
    gateway = await well(built(config, backends=lambda _: [backend]).gateway, "b0")
    for key in (KEY, "labs-key", "twin-key"):
        await serve(Listener(chat_ask(a_chat("word " * 300)), key=key), gateway)
    acme, labs, twin = (set(request.block_keys) for request in backend.requests)
    assert acme
    assert not acme & labs
    assert acme == twin
    await gateway.tokenizers.close()


async def test_a_model_that_only_a_backend_out_of_reach_serves_is_unavailable_not_unknown() -> None:
    backend = ScriptedBackend(well=False)
    gateway = a_gateway(backend)
    assert isinstance(await ended(Listener(chat_ask(a_chat())), gateway), NoBackend)
    backend.well = True
    await well(gateway, "b0")
    assert isinstance(await ended(Listener(chat_ask(a_chat(model="other"))), gateway), UnknownModel)


async def test_a_drained_backend_gets_no_new_request() -> None:
    gateway = await well(a_gateway(ScriptedBackend("b0"), ScriptedBackend("b1")), "b0", "b1")
    gateway.cluster.drain("b0")
    for _ in range(5):
        caller = Listener(chat_ask(a_chat()))
        await serve(caller, gateway)
        assert caller.placed == ["b1"]
    gateway.cluster.drain("b1")
    gateway.dispatcher.follow(replace(gateway.config, outage_s=0.01))
    error = await ended(Listener(chat_ask(a_chat())), gateway)
    assert isinstance(error, NoBackend)
    assert "b0: draining" in error.hint
    await gateway.tokenizers.close()


async def test_a_shaped_answer_comes_from_a_backend_that_can_or_is_refused_if_none_can() -> None:
    json_chat = a_chat(response_format={"type": "json_object"})
    able = ScriptedBackend("b1", capabilities=frozenset({Capability.STRUCTURED_OUTPUT}))
    gateway = await well(a_gateway(ScriptedBackend("b0"), able), "b0", "b1")
    for _ in range(5):
        caller = Listener(chat_ask(json_chat))
        await serve(caller, gateway)
        assert caller.placed == ["b1"]
    await gateway.tokenizers.close()

    gateway = await well(a_gateway(ScriptedBackend("b0")), "b0")
    error = await ended(Listener(chat_ask(json_chat)), gateway)
    assert isinstance(error, InvalidRequest)
    assert error.param == "response_format"
    await serve(Listener(chat_ask(a_chat(response_format={"type": "text"}))), gateway)
    await gateway.tokenizers.close()


@pytest.mark.parametrize(
    ("lacks", "fields", "param"),
    [
        (Capability.TOKEN_IDS, {"prompt": [1, 2]}, "prompt"),
        (Capability.LOGPROBS, {"prompt": "Hi", "logprobs": 1}, "logprobs"),
        (Capability.CHOICES, {"prompt": "Hi", "n": 2}, "n"),
    ],
)
async def test_an_unsupported_feature_is_refused_by_the_field_that_asks_for_it(
    lacks: Capability, fields: dict[str, Any], param: str
) -> None:
    backend = ScriptedBackend(capabilities=frozenset(Capability) - {lacks})
    gateway = await well(a_gateway(backend), "b0")
    error = await ended(Listener(completion_ask({"model": "tiny", **fields})), gateway)
    assert isinstance(error, InvalidRequest)
    assert error.param == param
    await gateway.tokenizers.close()
