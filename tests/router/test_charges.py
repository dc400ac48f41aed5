"""What a call is charged that did not end well: what its client saw, once."""

from __future__ import annotations

from typing import Any

from policies.errors import BackendFailed
from policies.nouns import Delta, Usage
from router.gateway import Gateway
from router.inbound.openai import chat_ask
from router.pipeline import serve
from tests.router.calls import Listener, a_gateway, ended, well
from tests.router.parts import ScriptedBackend, a_chat


def tokens_of(gateway: Gateway) -> dict[str, float]:
    """Tokens that tenants were charged, by kind."""
    return {
        sample.labels["kind"]: sample.value
        for metric in gateway.telemetry.registry.collect()
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


async def test_what_nobody_saw_of_a_backend_that_failed_is_not_charged_beside_the_answer_of_another() -> None:
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
