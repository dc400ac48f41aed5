"""Where a request goes when its rule's own backends are no use: on by `on_miss`, or refused with the reason."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from policies.errors import BackendFailed, ContextExceeded, NoBackend
from policies.on_miss import Degrade, Queue, Shed, Spill, Step
from policies.rules import Rule
from policies.sla.pools import PoolSpec
from router.call.gateway import Gateway
from router.call.pipeline import serve
from router.protocols.openai.request import chat_ask
from tests.router.callers import Listener, ended
from tests.router.parts import MODEL, ScriptedBackend, a_chat, a_config, built


async def a_gateway(*backends: ScriptedBackend, steps: tuple[Step, ...] = ()) -> Gateway:
    """Rules lead to the pool `own` alone; `far` is a second one."""
    pools = {name: PoolSpec(name, kind="fake", model=MODEL) for name in ("own", "far")}
    config = replace(
        a_config(), pools=pools, rules=(Rule("chat", pools=("own",)),), on_miss={"chat": steps}, outage_s=0.02
    )
    gateway = built(config, backends=lambda _: backends, rng=random.Random(1)).gateway
    for backend in backends:
        await gateway.cluster.probe(backend.name)
    return gateway


def misses(gateway: Gateway) -> dict[str, float]:
    return {
        sample.labels["step"]: sample.value
        for metric in gateway.observer.registry.collect()
        for sample in metric.samples
        if sample.name == "pointsman_misses_total"
    }


async def placed(gateway: Gateway, **fields: Any) -> list[str]:
    caller = Listener(chat_ask(a_chat(**fields)))
    await serve(caller, gateway)
    await gateway.tokenizers.close()
    assert gateway.dispatcher.is_idle()
    return caller.placed


FAR = ScriptedBackend("far-0", pool="far")


@pytest.mark.parametrize("steps", [(Spill("far"),), (Queue(5.0), Spill("far"), Shed(429))])
async def test_where_the_rules_own_backends_are_ill_it_spills_at_once(steps: tuple[Step, ...]) -> None:
    gateway = await a_gateway(ScriptedBackend("own-0", well=False), FAR, steps=steps)
    assert await placed(gateway) == ["far-0"]
    assert misses(gateway) == {"spill": 1.0}


async def test_without_a_step_that_leads_elsewhere_it_is_refused_as_before() -> None:
    gateway = await a_gateway(ScriptedBackend("own-0", well=False), FAR, steps=(Queue(5.0), Shed(429)))
    error = await ended(Listener(chat_ask(a_chat())), gateway)
    assert isinstance(error, NoBackend)
    assert "own-0: never reached for 0 s (it is away), far-0: outside the rule's pools" in error.hint
    assert misses(gateway) == {}


async def test_an_ill_pool_to_spill_to_is_reported_with_the_others() -> None:
    away = ScriptedBackend("far-0", pool="far", well=False)
    gateway = await a_gateway(
        ScriptedBackend("own-0", well=False), away, ScriptedBackend("x-0", pool="x"), steps=(Spill("far"),)
    )
    error = await ended(Listener(chat_ask(a_chat())), gateway)
    assert isinstance(error, NoBackend)
    assert "far-0: never reached for 0 s (it is away)" in error.hint


async def test_a_model_to_degrade_to_is_answered_by_any_pool_that_has_it() -> None:
    gateway = await a_gateway(ScriptedBackend("own-0", well=False), FAR, steps=(Degrade(MODEL),))
    assert await placed(gateway) == ["far-0"]


async def test_after_a_failure_the_pool_to_spill_to_is_tried_last() -> None:
    failing = [ScriptedBackend(f"own-{n}", scripts=[[BackendFailed("gone")]]) for n in range(2)]
    gateway = await a_gateway(*failing, FAR, steps=(Spill("far"), Shed(429)))
    assert (await placed(gateway))[2:] == ["far-0"]
    assert misses(gateway) == {"spill": 1.0}


async def test_after_a_failure_others_of_the_rule_come_before_the_pool_to_spill_to() -> None:
    failing = ScriptedBackend("own-0", scripts=[[BackendFailed("gone")] for _ in range(4)])
    gateway = await a_gateway(failing, ScriptedBackend("own-1"), FAR, steps=(Spill("far"),))
    assert (await placed(gateway))[-1] == "own-1"
    assert misses(gateway) == {}


async def test_a_prompt_that_no_backend_of_its_rule_has_the_context_for_is_the_clients_to_shorten() -> None:
    gateway = await a_gateway(ScriptedBackend("own-0", context_tokens=16), FAR)
    error = await ended(Listener(chat_ask(a_chat("word " * 40))), gateway)
    assert isinstance(error, ContextExceeded)
    assert "have a context of 16 tokens at most" in error.hint


async def test_or_spills_to_one_that_has_it() -> None:
    gateway = await a_gateway(ScriptedBackend("own-0", context_tokens=16), FAR, steps=(Spill("far"),))
    assert await placed(gateway, messages=[{"role": "user", "content": "word " * 40}]) == ["far-0"]
