"""Which endpoints a gateway is offered."""

from __future__ import annotations

from typing import Any

import pytest

from backends.http.backend import HttpBackend
from backends.openai.compatible import OpenAICompatible, OpenAIOptions
from backends.vllm import VLLM, VLLMOptions
from policies.nouns import Decision
from router.protocols.picker.endpoints import Reach
from tests.standins.standin import running
from tests.standins.vllm import VLLMServer

CHAT = "/v1/chat/completions"


def a_vllm(name: str, host: str, **options: Any) -> HttpBackend:
    return VLLM(name, f"http://{host}:80", pool="p", options=VLLMOptions(**options))


def offered(chosen: HttpBackend, *others: HttpBackend, gone: frozenset[str] = frozenset()) -> list[str]:
    """Names of what is offered where `chosen` is best, then `others`; those that are `gone` have left."""
    ranked = (chosen, *others)
    scores = tuple((backend.name, 1.0 - at / 10) for at, backend in enumerate(ranked))
    there = {backend.name: backend for backend in ranked if backend.name not in gone}
    reach = Reach(CHAT, None, there.__getitem__)
    return list(reach.named(Decision(chosen.name, "p", scores=scores), chosen).values())


def test_the_next_best_stand_behind_the_chosen_one_and_there_are_few() -> None:
    backends = [a_vllm(f"b{at}", f"10.0.0.{at}") for at in range(5)]
    assert offered(*backends) == ["b0", "b1", "b2"]


def test_a_backend_that_has_left_since_the_decision_is_not_offered() -> None:
    backends = [a_vllm(f"b{at}", f"10.0.0.{at}") for at in range(3)]
    assert offered(*backends, gone=frozenset({"b0", "b1"})) == ["b0", "b2"]


def test_a_request_is_not_offered_to_backends_that_would_get_another_body() -> None:
    first, last = a_vllm("b0", "10.0.0.1", key="k"), a_vllm("b5", "10.0.0.9", key="k")
    others = [
        a_vllm("b1", "10.0.0.2", key="another"),
        a_vllm("b2", "10.0.0.3", key="k", models={"m": "theirs"}),
        a_vllm("b3", "10.0.0.4", key="k", cache_salt=False),
        OpenAICompatible("b4", "http://10.0.0.5:80", pool="p", options=OpenAIOptions(key="k")),
    ]
    assert offered(first, *others, last) == ["b0", "b5"]


@pytest.mark.parametrize("allowed", ["[2001:db8::1]:80", "[2001:db8::1]", "2001:db8::1"])
def test_an_address_of_version_6_is_allowed_with_and_without_its_port_and_brackets(allowed: str) -> None:
    there = a_vllm("b0", "[2001:DB8:0::1]")
    for subset, reason in ((allowed, None), ("2001:db8::2", "not_in_subset")):
        assert Reach(CHAT, frozenset({subset}), {"b0": there}.__getitem__).unfit("b0") == reason


async def test_ranks_of_one_server_are_one_endpoint_and_only_the_same_rank_stands_behind_the_chosen_one() -> None:
    async with running(VLLMServer(ranks=2)) as server, running(VLLMServer(ranks=2)) as another:
        ranked = [VLLM(name, engine.url, pool="p") for name, engine in (("b0", server), ("b1", another))]
        for backend in ranked:
            await backend.probe()
        (b0, b1), (second, fourth) = ranked, [backend.ranks()[0] for backend in ranked]
        assert offered(second, b0, b1, fourth) == ["b0/1", "b1/1"]
        for backend in ranked:
            await backend.close()
