"""The life of a request: whatever happens, it is settled once and nothing is left."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from importlib import import_module
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.fake import Answer, FakeBackend
from policies.errors import (
    BackendFailed,
    BackendRefused,
    ContextExceeded,
    DeadlineExceeded,
    ExpectedError,
    InvalidRequest,
    Overloaded,
)
from policies.nouns import Delta, Usage
from router.call.bid import MOST_TRIES
from router.call.caller import CallerGone
from router.call.edges import outer_edge, together, within
from router.call.outcome import outcome_of
from router.call.pipeline import serve
from router.operate.telemetry.telemetry import Telemetry
from router.protocols.openai.request import chat_ask, completion_ask
from tests.router.callers import Listener, a_gateway, ended, well
from tests.router.parts import MODEL, ScriptedBackend, a_chat, an_answer, series

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
        backends = [
            ScriptedBackend(f"b{i}", scripts=[list(deltas)], speaks_tokens=False) for i, deltas in enumerate(scripts)
        ]
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
            for metric in gateway.observer.registry.collect()
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


async def test_a_prompt_with_an_estimate_that_is_too_long_is_left_to_the_backend() -> None:
    backend = ScriptedBackend(speaks_tokens=False, context_tokens=2560)
    gateway = await well(a_gateway(backend), "b0")
    for limit in (None, 16):
        caller = Listener(chat_ask(a_chat(" document" * 1500, max_tokens=limit)))
        assert await ended(caller, gateway) is None
    asked = [request.max_new_tokens for request in backend.requests]
    assert asked[0] > 100, "where the client names no limit, the answer gets some room all the same"
    assert asked[1] == 16


async def test_the_backends_word_that_such_a_prompt_is_too_long_reaches_the_client() -> None:
    too_long = ContextExceeded("This model's maximum context length is 2560 tokens")
    backend = ScriptedBackend(speaks_tokens=False, context_tokens=2560, scripts=[[too_long]])
    gateway = await well(a_gateway(backend), "b0")
    assert await ended(Listener(chat_ask(a_chat(" document" * 2000))), gateway) is too_long
    assert len(backend.requests) == 1


async def test_token_ids_are_counted_and_refused_where_they_do_not_fit() -> None:
    backend = ScriptedBackend(speaks_tokens=False, context_tokens=64)
    gateway = await well(a_gateway(backend), "b0")
    error = await ended(Listener(completion_ask({"model": MODEL, "prompt": [1] * 65})), gateway)
    assert isinstance(error, ContextExceeded)
    assert backend.requests == []


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
    # only the first answer's length was a guess; the next ones are expected to be as long as those before
    assert [request.expected_new_tokens for request in backend.requests] == [chat.max_new_tokens, 1, 1]
    assert {request.promised for request in backend.requests} == {gateway.config.classes[chat.service_class]}
    await gateway.tokenizers.close()


def a_pair(*scripts: Any) -> list[ScriptedBackend]:
    """A backend with a short context, which answers so, and one with a longer context."""
    short = ScriptedBackend(
        "b0", speaks_tokens=False, context_tokens=2560, scripts=[list(script) for script in scripts]
    )
    return [short, ScriptedBackend("b1", speaks_tokens=False, context_tokens=16_000)]


async def test_what_one_backend_finds_too_long_goes_to_one_with_a_longer_context() -> None:
    backends = a_pair([ContextExceeded("2,700 tokens are too many")])
    gateway = await well(a_gateway(*backends), "b0", "b1")
    gateway.cluster.drain("b1")
    caller = Listener(chat_ask(a_chat("word " * 2000, max_tokens=9)))
    asked = asyncio.create_task(ended(caller, gateway))
    await asyncio.wait_for(backends[0].began.wait(), 5)
    gateway.cluster.drain("b1", False)
    assert await asyncio.wait_for(asked, 5) is None
    assert caller.placed == ["b0", "b1"]


async def test_and_to_none_that_is_as_short() -> None:
    too_long = ContextExceeded("2,700 tokens are too many")
    backends = [
        ScriptedBackend(name, speaks_tokens=False, context_tokens=2560, scripts=[[too_long]]) for name in ("b0", "b1")
    ]
    gateway = await well(a_gateway(*backends), "b0", "b1")
    assert await ended(Listener(chat_ask(a_chat("word " * 2000))), gateway) is too_long
    assert sum(len(backend.requests) for backend in backends) == 1


async def test_estimates_follow_backends_counts_and_report_their_error() -> None:
    scripts = [an_answer("x", usage=Usage(900, 1)) for _ in range(12)]
    backend = ScriptedBackend(speaks_tokens=False, scripts=scripts)
    gateway = await well(a_gateway(backend), "b0")
    for _ in range(12):
        assert await ended(Listener(chat_ask(a_chat("今天我们讨论新的系统。" * 30))), gateway) is None
    first, last = backend.requests[0], backend.requests[-1]
    assert first.prompt_tokens < 500
    assert last.prompt_tokens == pytest.approx(900, rel=0.02)
    assert last.likely_prompt_tokens is not None
    assert last.likely_prompt_tokens[0] <= 900 <= last.likely_prompt_tokens[1]
    assert series(gateway.observer.registry, "prompt_estimate_error_count") == {(MODEL,): 12.0}
    gateway.check()


async def test_nothing_is_learnt_from_estimated_usage() -> None:
    backend = ScriptedBackend(speaks_tokens=False, scripts=[an_answer("x", usage=Usage(900, 1, is_guess=True))])
    gateway = await well(a_gateway(backend), "b0")
    assert await ended(Listener(chat_ask(a_chat())), gateway) is None
    assert gateway.text_lengths.of(MODEL).learnt == 0
    assert series(gateway.observer.registry, "prompt_estimate_error_count") == {}
    assert series(gateway.observer.registry, "usage_doubts_total") == {("b0", "uncounted"): 1.0}


@pytest.mark.parametrize("stream", [False, True])
async def test_what_was_made_for_a_request_is_not_left_to_the_garbage_collector(stream: bool) -> None:
    gateway = await well(a_gateway(ScriptedBackend("b0", scripts=[an_answer()] * 5)), "b0")
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        for _ in range(5):
            assert await ended(Listener(chat_ask(a_chat(stream=stream))), gateway) is None
        gc.collect()
        kinds = Counter(type(each).__qualname__ for each in gc.garbage if type(each).__module__.startswith("router."))
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert not [kind for kind, count in kinds.items() if count >= 5], "some came with each request"
    await gateway.tokenizers.close()


@pytest.mark.parametrize("failing", ["router.call.bodies.Held.give_back", "router.call.admission.Permit.settle"])
async def test_a_step_at_the_end_that_fails_keeps_no_other_from_being_done(
    failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, name, method = failing.rsplit(".", 2)
    owner = getattr(import_module(module), name)
    usual = getattr(owner, method)

    def fails(*args: Any) -> None:
        usual(*args)
        raise RuntimeError("the router made a mistake")

    gateway = await well(a_gateway(ScriptedBackend("b0", speaks_tokens=False)), "b0")
    monkeypatch.setattr(owner, method, fails)
    caller = Listener(chat_ask(a_chat()))
    assert isinstance(await ended(caller, gateway), RuntimeError)
    gateway.check()
    assert gateway.observer.registry.get_sample_value("pointsman_requests_total", _labels_of(gateway)) == 1.0
    await gateway.tokenizers.close()


def _labels_of(gateway: Any) -> dict[str, str]:
    """Those of the one request that was counted."""
    (sample,) = (
        sample
        for metric in gateway.observer.registry.collect()
        for sample in metric.samples
        if sample.name == "pointsman_requests_total"
    )
    return dict(sample.labels)
