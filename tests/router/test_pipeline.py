"""The life of a request: whatever happens, it is settled once and nothing is left."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.base import CacheListener
from backends.fake import Answer, FakeBackend
from policies.budget import Standing
from policies.errors import (
    BackendFailed,
    BackendRefused,
    DeadlineExceeded,
    ExpectedError,
    InvalidRequest,
    NoBackend,
    Overloaded,
    UnknownModel,
)
from policies.explain import Explanation
from policies.nouns import Capability, Delta, Outcome, Usage
from policies.prefix.index import PrefixIndex
from policies.rules import Range, Rule, When
from router.ask import Ask
from router.build import build
from router.caller import CallerGone, Placement
from router.gateway import Gateway
from router.inbound.openai import chat_ask, completion_ask
from router.outcome import outcome_of
from router.pipeline import MOST_TRIES, outer_edge, serve, together, within
from router.telemetry import Telemetry
from router.tracing import w3c_headers
from tests.router.parts import KEY, MODEL, ScriptedBackend, a_chat, a_config, an_answer


def tokens_of(gateway: Gateway) -> dict[str, float]:
    """Tokens that tenants were charged, by kind."""
    return {
        sample.labels["kind"]: sample.value
        for metric in gateway.telemetry.registry.collect()
        for sample in metric.samples
        if sample.name == "pointsman_tokens_total"
    }


class Listener:
    """A caller in the same process: keeps what it hears, and hangs up after so many pieces if told to."""

    def __init__(self, ask: Ask, *, hangs_up_after: int | None = None, key: str | None = KEY) -> None:
        self.id, self.key, self._ask, self._left = "r1", key, ask, hangs_up_after
        self.trace: Mapping[str, str] = w3c_headers(ask.headers)
        self.heard: list[Delta] = []
        self.placed: list[str] = []
        self.why: list[Explanation] = []

    async def read(self) -> Ask:
        return self._ask

    def limited(self, standing: Standing) -> None:
        self.standing = standing

    def explain(self, index: int, explanation: Explanation) -> None:
        self.why.append(explanation)

    async def place(self, index: int, placement: Placement) -> None:
        self.placed.append(placement.backend)

    async def write(self, index: int, delta: Delta) -> None:
        if self._left is not None:
            if not self._left:
                raise CallerGone
            self._left -= 1
        self.heard.append(delta)

    def has_seen(self, index: int) -> bool:
        return any(delta.text for delta in self.heard)


def a_gateway(*backends: Any, **parts: Any) -> Gateway:
    return build(a_config(), backends=lambda _: backends, rng=random.Random(1), **parts)


async def well(gateway: Gateway, *names: str) -> Gateway:
    for name in names:
        assert await gateway.cluster.probe(name)
    return gateway


async def ended(caller: Listener, gateway: Gateway) -> BaseException | None:
    try:
        await serve(caller, gateway)
    except (Exception, asyncio.CancelledError) as error:
        return error
    return None


FAILURES = (BackendFailed("gone"), BackendRefused("no"), InvalidRequest("bad"), Overloaded("full"), RuntimeError("bug"))
script = st.builds(
    lambda texts, failure, at: [
        *[Delta(text=text, token_ids=(1,)) for text in texts[:at]],
        *([] if failure is None else [failure]),
        *[Delta(text=text, token_ids=(1,)) for text in texts[at:]],
        Delta(finish_reason="stop", usage=Usage(5, len(texts), 1)),
    ],
    st.lists(st.sampled_from(["", "a", "b"]), max_size=3),
    st.none() | st.sampled_from(FAILURES) | st.just(asyncio.CancelledError()),
    st.integers(0, 3),
)


@settings(deadline=None, max_examples=60)
@given(st.lists(script, min_size=4, max_size=4), st.none() | st.integers(0, 3))
def test_whatever_backends_and_client_do_each_request_is_settled_once(scripts: Any, hangs_up_after: int | None) -> None:
    async def run() -> None:
        backends = [ScriptedBackend(f"b{i}", scripts=[list(one)], speaks_tokens=False) for i, one in enumerate(scripts)]
        gateway = await well(a_gateway(*backends), *(backend.name for backend in backends))
        caller = Listener(chat_ask(a_chat()), hangs_up_after=hangs_up_after)
        error = await ended(caller, gateway)
        gateway.check()
        assert gateway.admission.settled == {outcome_of(error): 1}
        assert all(backend.open == 0 for backend in backends)
        assert len(caller.placed) <= MOST_TRIES
        assert len(set(caller.placed)) == len(caller.placed)
        counted = [
            sample.value
            for metric in gateway.telemetry.registry.collect()
            for sample in metric.samples
            if sample.name == "pointsman_requests_total"
        ]
        assert counted == [1.0]
        if error is None:
            assert caller.heard[-1].usage is not None
        await gateway.tokenizers.close()

    asyncio.run(run())


@pytest.fixture
def telemetry() -> Telemetry:
    return Telemetry()


async def test_a_request_goes_where_its_prefix_lives() -> None:
    listeners: list[CacheListener] = []
    backends = [ScriptedBackend(f"b{i}") for i in range(3)]

    def make(listener: CacheListener) -> list[ScriptedBackend]:
        listeners.append(listener)
        return backends

    gateway = build(a_config(), backends=make, rng=random.Random(2))
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
    from tests.router.parts import a_tenant

    backend = ScriptedBackend()
    config = a_config(a_tenant("acme"), a_tenant("labs", "labs-key"), a_tenant("twin", "twin-key", domain="acme"))
    gateway = await well(build(config, backends=lambda _: [backend]), "b0")
    for key in (KEY, "labs-key", "twin-key"):
        await serve(Listener(chat_ask(a_chat("word " * 300)), key=key), gateway)
    acme, labs, twin = (set(request.block_keys) for request in backend.requests)
    assert acme
    assert not acme & labs
    assert acme == twin
    await gateway.tokenizers.close()


async def test_the_shipped_fake_is_a_backend_too() -> None:
    flaky = Answer(texts=("never",), error=BackendFailed("gone"))
    backends = [FakeBackend(f"b{i}", "own", script=[flaky, Answer()], models=frozenset({MODEL})) for i in range(2)]
    gateway = await well(a_gateway(*backends), "b0", "b1")
    error = await ended(Listener(chat_ask(a_chat())), gateway)
    assert isinstance(error, BackendFailed)
    caller = Listener(chat_ask(a_chat()))
    await serve(caller, gateway)
    assert "".join(delta.text for delta in caller.heard) == "Hello, world."
    for backend in backends:
        backend.check()
    gateway.check()
    await gateway.tokenizers.close()


async def test_an_echoed_prompt_stands_before_each_choice() -> None:
    answer: list[Any] = [
        Delta(computed_tokens=1),
        *[Delta(text="!", choice=at, finish_reason="stop") for at in (0, 1)],
        Delta(usage=Usage(1, 1)),
    ]
    for prompt in ("hey", [72, 7]):
        gateway = await well(a_gateway(ScriptedBackend(scripts=[list(answer)])), "b0")
        caller = Listener(completion_ask({"model": MODEL, "prompt": prompt, "echo": True, "n": 2}))
        await serve(caller, gateway)
        texts = [delta.text for delta in caller.heard if delta.text]
        assert len(texts) == 2
        assert all(text.endswith("!") and len(text) > 1 for text in texts)
        assert prompt != "hey" or texts == ["hey!", "hey!"]
        await gateway.tokenizers.close()


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


async def test_a_model_that_only_a_backend_out_of_reach_serves_is_unavailable_not_unknown() -> None:
    backend = ScriptedBackend(well=False)
    gateway = a_gateway(backend)
    assert isinstance(await ended(Listener(chat_ask(a_chat())), gateway), NoBackend)
    backend.well = True
    await well(gateway, "b0")
    assert isinstance(await ended(Listener(chat_ask(a_chat(model="other"))), gateway), UnknownModel)


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
async def test_what_no_backend_can_do_is_told_by_the_field_that_asks_for_it(
    lacks: Capability, fields: dict[str, Any], param: str
) -> None:
    backend = ScriptedBackend(capabilities=frozenset(Capability) - {lacks})
    gateway = await well(a_gateway(backend), "b0")
    error = await ended(Listener(completion_ask({"model": "tiny", **fields})), gateway)
    assert isinstance(error, InvalidRequest)
    assert error.param == param
    await gateway.tokenizers.close()


async def test_a_drained_backend_gets_no_new_request() -> None:
    gateway = await well(a_gateway(ScriptedBackend("b0"), ScriptedBackend("b1")), "b0", "b1")
    gateway.cluster.drain("b0")
    for _ in range(5):
        caller = Listener(chat_ask(a_chat()))
        await serve(caller, gateway)
        assert caller.placed == ["b1"]
    gateway.cluster.drain("b1")
    gateway.config = replace(gateway.config, outage_s=0.01)
    error = await ended(Listener(chat_ask(a_chat())), gateway)
    assert isinstance(error, NoBackend)
    assert "b0: healthy" in error.hint
    await gateway.tokenizers.close()


async def test_a_deadline_that_passed_is_not_mistaken_for_another_timeout() -> None:
    with pytest.raises(DeadlineExceeded):
        async with within(0.0):
            await asyncio.Event().wait()
    with pytest.raises(TimeoutError, match="another"):
        async with within(60.0):
            raise TimeoutError("another")


async def test_the_first_failure_of_several_prompts_ends_the_others_and_comes_alone() -> None:
    cancelled = asyncio.Event()

    async def waits() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    async def fails() -> None:
        await asyncio.sleep(0)
        raise BackendFailed("gone")

    with pytest.raises(BackendFailed, match="gone"):
        await together([waits(), fails()])
    assert cancelled.is_set()


def test_the_outer_edge_lets_through_what_was_planned_and_hides_the_rest(telemetry: Telemetry) -> None:
    for planned in (BackendFailed("x"), CallerGone()):
        with pytest.raises(type(planned)), outer_edge(telemetry):
            raise planned
    with pytest.raises(ExpectedError) as caught, outer_edge(telemetry):
        raise ZeroDivisionError("secret")
    assert "secret" not in str(caught.value)


async def test_an_answer_uses_as_much_context_as_is_left() -> None:
    backend = ScriptedBackend(context_tokens=100, scripts=[an_answer("a")] * 3)
    gateway = await well(a_gateway(backend), "b0")
    await serve(Listener(chat_ask(a_chat())), gateway)
    await serve(Listener(completion_ask({"model": MODEL, "prompt": [5] * 90})), gateway)
    await serve(Listener(completion_ask({"model": MODEL, "prompt": [5] * 50})), gateway)
    chat, nearly_full, half_full = backend.requests
    assert chat.max_new_tokens == 100 - chat.prompt_tokens
    assert nearly_full.max_new_tokens == 10
    assert half_full.max_new_tokens == 16
    await gateway.tokenizers.close()


def test_every_outcome_has_a_cause() -> None:
    causes = [None, asyncio.CancelledError(), CallerGone(), InvalidRequest("x"), BackendFailed("x"), RuntimeError()]
    outcomes = [outcome_of(cause) for cause in causes]
    assert outcomes == [
        Outcome.FINISHED,
        Outcome.CANCELLED,
        Outcome.CANCELLED,
        Outcome.REJECTED,
        Outcome.FAILED,
        Outcome.FAILED,
    ]


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
    # a clock that stands still: nobody is found to be faster than the other
    router = build(config, backends=lambda _: backends, rng=random.Random(1), clock=lambda: 1.0)
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
    assert [one.service_class for backend in backends for one in backend.requests].count("batch") == 1
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
    gateway.shadow = replace(a_config(), rules=(Rule("batch"),))
    await serve(Listener(chat_ask(a_chat())), gateway)
    gateway.shadow = a_config()
    await serve(Listener(chat_ask(a_chat())), gateway)
    assert [request.service_class for request in backends[0].requests] == ["chat", "chat"]
    counted = {
        sample.labels["what"]: sample.value
        for metric in gateway.telemetry.registry.collect()
        for sample in metric.samples
        if sample.name == "pointsman_shadow_differences_total"
    }
    assert counted == {"class": 1.0, "none": 1.0}
    await gateway.tokenizers.close()


async def test_who_hangs_up_pays_for_what_its_backend_was_believed_to_compute_and_not_for_the_whole_prompt() -> None:
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
