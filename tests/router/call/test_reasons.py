"""Explanations of decisions: the facts that the rules saw, the reasons, and what another file would have done."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

from policies.errors import BackendFailed
from policies.prefix.index import PrefixIndex
from policies.rules import Range, Rule, When
from router.call.pipeline import serve
from router.protocols.openai.request import chat_ask
from tests.router.callers import Listener, a_gateway, ended, well
from tests.router.parts import ScriptedBackend, a_chat, a_config, built


class CountingIndex(PrefixIndex):
    """Counts how often a prompt is looked up."""

    walks = 0

    def longest(self, keys: Sequence[int]) -> Mapping[str, int]:
        self.walks += 1
        return super().longest(keys)


async def test_rules_see_what_no_backend_holds_and_the_index_is_walked_once() -> None:
    cached = Rule("batch", When(uncached_tokens=(Range(None, 100),)))
    config = replace(a_config(), rules=(cached, Rule("chat")))
    backends = [ScriptedBackend("b0", scripts=[[BackendFailed("gone")]]), ScriptedBackend("b1")]
    # a clock that stands still: neither is found to be faster
    router = built(config, backends=lambda _: backends, rng=random.Random(1), clock=lambda: 1.0).gateway
    gateway = await well(router, "b0", "b1")
    index = gateway.beliefs.index = CountingIndex()
    ask = chat_ask(a_chat("word " * 300), {"x-pointsman-explain": "1"})
    cold, warm = Listener(ask), Listener(ask)
    await serve(cold, gateway)
    (request, *_) = backends[1].requests
    index.store("b1", request.block_keys)
    gateway.cluster.drain("b1")
    await serve(Listener(ask), gateway)
    gateway.cluster.drain("b1", False)
    # which holds it by now as well, as its answer let be known
    gateway.cluster.drain("b0")
    await serve(warm, gateway)
    assert [why.service_class for why in cold.why] == ["chat"] * len(cold.why)
    assert [request.service_class for backend in backends for request in backend.requests].count("batch") == 1
    assert (warm.why[0].chosen, warm.why[0].service_class) == ("b1", "batch")
    assert warm.why[0].uncached_tokens == request.prompt_tokens - 64 * len(request.block_keys)
    # one for each request, and one for the second try of the first
    assert index.walks == 4
    await gateway.tokenizers.close()


async def test_an_explanation_is_made_for_each_try_and_only_if_asked_for() -> None:
    backends = [ScriptedBackend("b0", scripts=[[BackendFailed("gone")]] * 2, speaks_tokens=False)]
    gateway = await well(a_gateway(*backends), "b0")
    silent, curious = Listener(chat_ask(a_chat())), Listener(chat_ask(a_chat(), {"x-pointsman-explain": "1"}))
    for caller in (silent, curious):
        assert isinstance(await ended(caller, gateway), BackendFailed)
    assert silent.why == []
    assert [(why.chosen, dict(why.dropped)) for why in curious.why] == [("b0", {}), (None, {"b0": "avoided"})]


async def test_what_a_shadow_file_would_do_otherwise_is_counted_and_does_nothing() -> None:
    backends = [ScriptedBackend("b0", speaks_tokens=False)]
    gateway = await well(a_gateway(*backends), "b0")
    gateway.decider.shadow = replace(a_config(), rules=(Rule("batch"),))
    await serve(Listener(chat_ask(a_chat())), gateway)
    gateway.decider.shadow = a_config()
    await serve(Listener(chat_ask(a_chat())), gateway)
    assert [request.service_class for request in backends[0].requests] == ["chat", "chat"]
    counted = {
        sample.labels["what"]: sample.value
        for metric in gateway.observer.registry.collect()
        for sample in metric.samples
        if sample.name == "pointsman_shadow_differences_total"
    }
    assert counted == {"class": 1.0, "none": 1.0}
    await gateway.tokenizers.close()
