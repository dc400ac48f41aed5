"""The facts of a call, by which the rules choose its class."""

from __future__ import annotations

import random

import pytest

from policies.sla.parse import parse
from router.protocols.openai.request import completion_ask
from tests.router.callers import Listener, ended, well
from tests.router.parts import MODEL, ScriptedBackend, an_answer, built

FILE = f"""
classes: {{short: {{}}, long: {{}}}}
tenants: {{all: {{anonymous: true}}}}
rules: [{{when: {{prompt_tokens: ">= 100"}}, class: long}}, {{class: short}}]
pools: {{own: {{kind: fake, at: ["x:1"], model: {MODEL}}}}}
"""
LONG = "word " * 400


@pytest.mark.parametrize(
    ("prompts", "service_class"),
    [
        (["hi"], "short"),
        (["hi", "ho"], "short"),
        (["hi", LONG], "long"),
        ([LONG, "hi"], "long"),
        (["hi", LONG, "ho"], "long"),
    ],
    ids=["short", "two short", "short, long", "long, short", "short, long, short"],
)
async def test_the_longest_prompt_of_a_call_decides_its_class(prompts: list[str], service_class: str) -> None:
    backend = ScriptedBackend(speaks_tokens=False, scripts=[an_answer("ok") for _ in prompts])
    gateway = built(parse(FILE), backends=lambda _: [backend], rng=random.Random(1)).gateway
    await well(gateway, "b0")
    ask = completion_ask({"model": MODEL, "prompt": prompts}, {"x-pointsman-explain": "1"})
    caller = Listener(ask, key=None)
    assert await ended(caller, gateway) is None
    assert {explanation.service_class for explanation in caller.why} == {service_class}
