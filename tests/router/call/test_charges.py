"""What a call is charged that did not end well: what its client saw, once."""

from __future__ import annotations

from typing import Any

import pytest

from policies.errors import BackendFailed
from policies.nouns import Delta, Usage
from router.call.caller import CallerGone
from router.call.gateway import Gateway
from router.call.pipeline import serve
from router.protocols.openai.request import chat_ask, completion_ask
from tests.router.callers import Listener, a_gateway, ended, well
from tests.router.parts import ScriptedBackend, a_chat, an_answer


def tokens_of(gateway: Gateway) -> dict[str, float]:
    """Tokens that tenants were charged, by kind."""
    return {
        sample.labels["kind"]: sample.value
        for metric in gateway.observer.registry.collect()
        for sample in metric.samples
        if sample.name == "pointsman_tokens_total"
    }


async def test_what_was_drawn_before_a_failure_is_charged() -> None:
    script: list[Any] = [Delta(text="a", token_ids=(1, 2)), BackendFailed("gone")]
    gateway = await well(a_gateway(ScriptedBackend(scripts=[script])), "b0")
    assert isinstance(await ended(Listener(chat_ask(a_chat())), gateway), BackendFailed)
    charged = tokens_of(gateway)
    assert charged["completion"] == 2
    assert charged["prompt"] > 0
    await gateway.tokenizers.close()


async def test_unseen_tokens_of_a_failed_backend_are_not_charged_beside_the_answer_of_another() -> None:
    unseen: list[Any] = [Delta(tokens=7), BackendFailed("gone")]
    answer: list[Any] = [Delta(text="a", finish_reason="stop"), Delta(usage=Usage(5, 2))]
    scripts = [unseen, answer]
    gateway = await well(a_gateway(*(ScriptedBackend(name, scripts=scripts) for name in ("b0", "b1"))), "b0", "b1")
    caller = Listener(chat_ask(a_chat()))
    await serve(caller, gateway)
    assert len(caller.placed) == 2
    charged = tokens_of(gateway)
    assert (charged["prompt"], charged["completion"]) == (5, 2)
    await gateway.tokenizers.close()


async def test_a_disconnected_client_pays_for_the_estimated_computation_and_not_for_the_whole_prompt() -> None:
    text = "the quick brown fox " * 300
    long = an_answer("a", usage=Usage(1000, 1, 0))
    gateway = await well(a_gateway(ScriptedBackend(scripts=[long, an_answer("a", "b", "c")])), "b0")
    await serve(Listener(chat_ask(a_chat(text))), gateway)
    before = tokens_of(gateway)
    with pytest.raises(CallerGone):
        await serve(Listener(chat_ask(a_chat(text)), hangs_up_after=1), gateway)
    charged = {kind: count - before.get(kind, 0.0) for kind, count in tokens_of(gateway).items()}
    assert charged["cached"] > 0.5 * charged["prompt"] > 0
    await gateway.tokenizers.close()


async def test_a_count_that_cannot_be_charges_the_fair_queue_no_more_than_the_time_that_passed() -> None:
    gateway = await well(a_gateway(ScriptedBackend(scripts=[an_answer("a", usage=Usage(10, 10**12, 0))])), "b0")
    await serve(Listener(chat_ask(a_chat())), gateway)
    (queue,) = gateway.dispatcher._queues.values()
    assert queue.fair._queues["chat"].tenants["acme"].account.tag < 60.0
    await gateway.tokenizers.close()


async def test_an_answer_is_expected_to_be_as_long_as_one_of_several_was() -> None:
    pieces = [Delta(text="a", choice=choice, finish_reason="stop") for choice in range(4)]
    backend = ScriptedBackend(scripts=[[*pieces, Delta(usage=Usage(7, 400, 0))]])
    gateway = await well(a_gateway(backend), "b0")
    await serve(Listener(completion_ask({"model": "tiny", "prompt": "Hi", "n": 4, "max_tokens": 200})), gateway)
    assert gateway.lengths.expected("acme", "chat", most=4096) == 100
    await gateway.tokenizers.close()
