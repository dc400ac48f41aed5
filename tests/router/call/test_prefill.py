"""A prompt is computed at a backend of its own, and its answer elsewhere: one request, however either leg ends."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from msgspec.structs import replace as with_fields

from backends.base import Description, Load, Prefilled
from backends.fake import Answer, FakeBackend
from policies.errors import (
    BackendErred,
    BackendFailed,
    BackendLost,
    ContextExceeded,
    DeadlineExceeded,
    ExpectedError,
    NoBackend,
    PrefillFailed,
    RequestFails,
)
from policies.nouns import Delta, Native, Prompt, Request, Usage
from policies.sla.config import Config
from policies.sla.pools import PoolSpec
from router.call.bid import MOST_TRIES
from router.call.gateway import Gateway
from router.call.prefill import LEAST_S, may_transfer
from router.protocols.openai.request import chat_ask
from tests.router.callers import Listener, ended, well
from tests.router.parts import MODEL, a_chat, a_config, built
from tests.virtual_time import run_virtually

LONG = "word " * 8000
BUSY = Load(running=50, waiting=0, reported_at=0.0)
CACHED = 64
USUAL = Answer()


@dataclass(slots=True)
class PromptBackend(FakeBackend):
    """Computes prompts for others, each in `seconds`; `failure` is raised instead. `counts` has how they ended."""

    seconds: float = 0.1
    failure: ExpectedError | None = None
    counts: Counter[str] | None = None

    async def prefill(self, request: Request, prompt: Prompt) -> Prefilled:
        counts = self.counts = Counter() if self.counts is None else self.counts
        counts["begun"] += 1
        try:
            await asyncio.sleep(self.seconds)
        except asyncio.CancelledError:
            counts["cancelled"] += 1
            raise
        if self.failure is not None:
            raise self.failure
        counts["done"] += 1
        return Prefilled({"from": self.name, "for": request.id}, Usage(request.prompt_tokens, 1, CACHED))

    def count(self, how: str) -> int:
        return 0 if self.counts is None else self.counts[how]


@dataclass(slots=True)
class HandingBackend(PromptBackend):
    """Hands KV over to a backend that awaits it, in a room of its own for each prompt."""

    rooms: itertools.count[int] = field(default_factory=itertools.count)

    def pair(self) -> Mapping[str, Any]:
        return {"from": self.name, "room": next(self.rooms)}


@dataclass(slots=True)
class AwaitingBackend(FakeBackend):
    """Computes no prompts: it answers `hands_over` seconds after it got one, which is then whole."""

    hands_over: float = 0.0

    def describe(self) -> Description | None:
        known = FakeBackend.describe(self)
        return known and replace(known, needs_prefill=True)

    async def generate(self, request: Request, prompt: Prompt) -> AsyncGenerator[Delta]:
        await asyncio.sleep(self.hands_over)
        async with aclosing(FakeBackend.generate(self, request, prompt)) as deltas:
            async for delta in deltas:
                yield delta


class World:
    """A gateway in virtual time: backends of `kind` that compute prompts, and some busy ones that answer.

    With `meets` the legs run at the same time, and those that answer compute nothing.
    """

    def __init__(
        self,
        script: Callable[[Request, Prompt], Answer] | Answer = USUAL,
        answering: int = 2,
        *,
        prefilling: int = 1,
        meets: bool = False,
    ) -> None:
        kind, of_answers = (HandingBackend, AwaitingBackend) if meets else (PromptBackend, FakeBackend)
        models = frozenset({MODEL})
        self.all_prompts = [kind(f"p{at}", pool="prompts", models=models) for at in range(prefilling)]
        self.prompts = self.all_prompts[0]
        self.answers = [
            of_answers(f"a{at}", pool="answers", models=models, script=script, reported=BUSY) for at in range(answering)
        ]
        pools = {
            "answers": PoolSpec("answers", kind="vllm", prefill="prompts"),
            "prompts": PoolSpec("prompts", kind="vllm"),
        }
        config: Config = replace(a_config(), pools=pools)
        self._numbers = itertools.count(1)
        self.events: Counter[str] = Counter()
        self.spent: list[Usage] = []
        clock = asyncio.get_running_loop().time
        self.gateway: Gateway = built(
            config, backends=lambda _: [*self.answers, *self.all_prompts], rng=random.Random(1), clock=clock
        ).gateway
        self.gateway.observer.event = lambda name: self.events.update([name])  # type: ignore[method-assign]

    async def ask(self, text: str = LONG, **fields: Any) -> tuple[Listener, BaseException | None, float]:
        """Send a request: its client, how it ended, and the seconds that it took."""
        await well(self.gateway, *(backend.name for backend in (*self.all_prompts, *self.answers)))
        caller = Listener(with_fields(chat_ask(a_chat(text, stream=True, **fields)), explain=True))
        caller.id = f"r{next(self._numbers)}"
        began_at = self.gateway.clock()
        error = await ended(caller, self.gateway)
        return caller, error, self.gateway.clock() - began_at

    @property
    def received(self) -> list[Prompt]:
        """What came to the backends that answer."""
        return [prompt for backend in self.answers for _, prompt in backend.received]

    async def close(self) -> None:
        """Assert that nothing is left anywhere."""
        self.gateway.check()
        for backend in self.answers:
            assert backend.open_requests == 0, backend
        await self.gateway.tokenizers.close()


def virtually(scenario: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def test() -> None:
        run_virtually(scenario())

    test.__name__, test.__doc__ = scenario.__name__, scenario.__doc__
    return test


def text_of(caller: Listener) -> str:
    return "".join(delta.text for delta in caller.heard)


TEXT = "Hello, world."


@virtually
async def test_a_long_prompt_is_computed_elsewhere_where_it_would_stall_others() -> None:
    world = World()
    caller, error, _ = await world.ask()
    assert (error, text_of(caller)) == (None, TEXT)
    (prompt,) = world.received
    assert prompt.transfer == {"from": "p0", "for": "r1"}
    assert world.events == {"prefilled_elsewhere": 1}
    assert {name[0] for name in caller.placed} == {"a"}
    (why,) = caller.why
    assert why.prefill is not None
    assert why.prefill.saved > 0
    await world.close()


@virtually
async def test_usage_counts_the_prompt_once_and_as_cached_what_was_not_computed() -> None:
    world = World()
    caller, _, _ = await world.ask()
    (usage,) = [delta.usage for delta in caller.heard if delta.usage]
    assert usage.cached_tokens == CACHED
    assert usage.completion_tokens == len(Answer().texts)
    await world.close()


@virtually
async def test_a_short_prompt_goes_straight_to_its_backend() -> None:
    world = World()
    caller, error, _ = await world.ask("hello")
    assert (error, text_of(caller), world.prompts.count("begun")) == (None, TEXT, 0)
    assert [prompt.transfer for prompt in world.received] == [None]
    await world.close()


@virtually
async def test_no_request_goes_to_a_backend_that_only_prefills() -> None:
    world = World()
    caller, _, _ = await world.ask()
    (why,) = caller.why
    assert why.dropped["p0"] == "only_prefills"
    assert world.prompts.begun == 0
    await world.close()


FAILURES = [BackendFailed("broke off"), BackendErred("answered 500"), ContextExceeded("too long")]


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: type(failure).__name__)
def test_where_the_first_leg_fails_the_answering_backend_computes_the_prompt(failure: ExpectedError) -> None:
    async def scenario() -> None:
        world = World()
        world.prompts.failure = failure
        caller, error, _ = await world.ask()
        assert (error, text_of(caller)) == (None, TEXT)
        assert [prompt.transfer for prompt in world.received] == [None]
        assert world.events == {"prefill_failed": 1, "retried": 1}
        await world.close()

    run_virtually(scenario())


@virtually
async def test_a_late_first_leg_is_cancelled() -> None:
    world = World()
    world.prompts.seconds = 1000.0
    caller, error, seconds = await world.ask()
    assert (error, text_of(caller)) == (None, TEXT)
    assert world.prompts.count("cancelled") == 1
    (first, *_) = caller.why
    assert first.prefill is not None
    assert seconds == pytest.approx(3.0 * first.prefill.seconds + LEAST_S, abs=0.1)
    await world.close()


@virtually
async def test_a_backend_that_cannot_fetch_computes_the_prompt_itself_and_is_not_to_blame() -> None:
    def lost(_: Request, prompt: Prompt) -> Answer:
        return Answer() if prompt.transfer is None else Answer(error=BackendErred("KV load failure"))

    world = World(lost, answering=1)
    for number in range(5):
        # each a prompt of its own, which no cache holds
        caller, error, _ = await world.ask(f"{number} {LONG}")
        assert (error, text_of(caller)) == (None, TEXT)
    assert not world.gateway.cluster.is_ill("a0")
    assert world.events["prefill_failed"] == world.events["retried"] == 5
    await world.close()


@virtually
async def test_a_backend_that_breaks_off_after_the_first_leg_is_replaced_by_another() -> None:
    def breaks(request: Request, prompt: Prompt) -> Answer:
        return Answer() if prompt.transfer is None else Answer(error=BackendFailed("broke off"))

    world = World(breaks)
    caller, error, _ = await world.ask()
    assert (error, text_of(caller)) == (None, TEXT)
    assert len(set(caller.placed)) == 2
    await world.close()


@virtually
async def test_the_only_backend_that_breaks_off_after_the_first_leg_gets_the_prompt_again() -> None:
    def breaks(_: Request, prompt: Prompt) -> Answer:
        return Answer() if prompt.transfer is None else Answer(error=BackendFailed("broke off"))

    world = World(breaks, answering=1)
    caller, error, _ = await world.ask()
    assert (error, text_of(caller)) == (None, TEXT)
    assert [prompt.transfer is None for prompt in world.received] == [False, True]
    await world.close()


@virtually
async def test_the_kv_of_a_prompt_is_fetched_at_most_once_and_for_that_prompt_alone() -> None:
    """Whatever fails meanwhile: an engine frees KV once it was fetched, and then uses its memory for other prompts."""
    rng = random.Random(7)

    def lost_at_times(_: Request, prompt: Prompt) -> Answer:
        failures = (BackendFailed("broke off"), BackendErred("KV load failure"), None, None)
        error = rng.choice(failures) if prompt.transfer is not None else None
        return Answer() if error is None else Answer(error=error)

    world, answered = World(lost_at_times, prefilling=2), 0
    for number in range(5):
        world.prompts.seconds = rng.choice((0.1, 1000.0))
        asked = await asyncio.gather(*(world.ask(f"{number} {other} {LONG}") for other in range(8)))
        # a prompt that failed at three backends is not tried again, and backends that fail are ill for a while
        assert {type(error) for _, error, _ in asked} <= {type(None), BackendFailed, NoBackend}
        assert all(text_of(caller) == TEXT for caller, error, _ in asked if error is None)
        answered += sum(error is None for _, error, _ in asked)
    assert answered >= 10
    sent = [(request, prompt) for backend in world.answers for request, prompt in backend.received]
    fetched = [(request.id, prompt.transfer["for"]) for request, prompt in sent if prompt.transfer is not None]
    assert len(fetched) >= 10
    assert all(asking == computed for asking, computed in fetched)
    assert len(set(fetched)) == len(fetched)
    await world.close()


@virtually
async def test_a_client_that_leaves_during_the_first_leg_cancels_it() -> None:
    world = World()
    world.prompts.seconds = 1000.0
    task = asyncio.create_task(world.ask())
    await asyncio.sleep(0.5)
    assert world.prompts.count("begun") == 1
    task.cancel()
    _, error, _ = await task
    assert isinstance(error, asyncio.CancelledError)
    assert (world.prompts.count("cancelled"), world.received) == (1, [])
    await world.close()


@virtually
async def test_a_client_that_leaves_during_the_second_leg_cancels_that() -> None:
    world = World(Answer(hangs_at=0))
    task = asyncio.create_task(world.ask())
    await asyncio.sleep(1.0)
    assert (world.prompts.count("done"), sum(backend.open_requests for backend in world.answers)) == (1, 1)
    task.cancel()
    await task
    assert sum(backend.cancelled for backend in world.answers) == 1
    await world.close()


@virtually
async def test_both_legs_share_one_deadline() -> None:
    world = World()
    world.prompts.seconds = 1000.0
    await well(world.gateway, "p0", "a0", "a1")
    caller = Listener(with_fields(chat_ask(a_chat(LONG)), deadline_s=0.5))
    error = await ended(caller, world.gateway)
    assert isinstance(error, DeadlineExceeded)
    assert world.prompts.count("cancelled") == 1
    await world.close()


def test_both_legs_read_the_prompt_from_one_body() -> None:
    assert may_transfer(None)
    assert may_transfer(Native("/v1/chat/completions", {}))
    assert not may_transfer(Native("/v1/messages", {}))


@virtually
async def test_where_kv_is_handed_over_both_legs_have_one_room_and_run_at_the_same_time() -> None:
    world = World(meets=True)
    world.prompts.seconds = 5.0
    for answers in world.answers:
        answers.hands_over = 5.01
    caller, error, seconds = await world.ask()
    assert (error, text_of(caller)) == (None, TEXT)
    assert seconds == pytest.approx(5.0, abs=0.1), "it has no limit of its own where nothing else would compute it"
    assert [prompt.transfer for prompt in world.received] == [{"from": "p0", "room": 0}]
    (usage,) = [delta.usage for delta in caller.heard if delta.usage]
    assert usage.cached_tokens == CACHED
    await world.close()


@virtually
async def test_a_backend_that_computes_no_prompts_gets_no_short_one_either_without_its_leg() -> None:
    world = World(meets=True)
    caller, error, _ = await world.ask("hello")
    assert (error, text_of(caller), world.prompts.count("done")) == (None, TEXT, 1)
    await world.close()


@pytest.mark.parametrize("failure", FAILURES[:2], ids=lambda failure: type(failure).__name__)
def test_a_first_leg_that_fails_ends_the_second_and_another_backend_computes_the_prompt(
    failure: ExpectedError,
) -> None:
    async def scenario() -> None:
        world = World(meets=True, prefilling=2, answering=1)
        for answers in world.answers:
            answers.hands_over = 5.0
        for prompts in world.all_prompts:
            prompts.failure = failure
        task = asyncio.create_task(world.ask())
        await asyncio.sleep(0.05)
        # the first of them has it, and the other one is well
        (idle,) = [prompts for prompts in world.all_prompts if not prompts.count("begun")]
        idle.failure = None
        caller, error, _ = await task
        assert (error, text_of(caller)) == (None, TEXT)
        assert [prompts.count("done") for prompts in world.all_prompts] == [int(p is idle) for p in world.all_prompts]
        assert world.events == {"prefill_failed": 1, "prefilled_elsewhere": 2, "retried": 1}
        await world.close()

    run_virtually(scenario())


@virtually
async def test_a_request_at_which_backends_fail_is_not_taken_to_all_of_them() -> None:
    world = World(meets=True, prefilling=MOST_TRIES + 2)
    for answers in world.answers:
        answers.hands_over = 5.0
    for prompts in world.all_prompts:
        prompts.failure = BackendErred("answered 500")
    _, error, _ = await world.ask()
    assert isinstance(error, PrefillFailed)
    assert sum(prompts.count("begun") for prompts in world.all_prompts) == MOST_TRIES
    await world.close()


@virtually
async def test_a_request_that_ends_backends_that_compute_its_prompt_is_to_blame_and_comes_to_no_third() -> None:
    world = World(meets=True, prefilling=MOST_TRIES + 2)
    for answers in world.answers:
        answers.hands_over = 5.0
    for prompts in world.all_prompts:
        prompts.failure = BackendLost("ended")
    for begun in (2, 2):
        _, error, _ = await world.ask()
        assert isinstance(error, RequestFails)
        assert sum(prompts.count("begun") for prompts in world.all_prompts) == begun
    assert world.events["poison_request"] == 1
    await world.close()


@virtually
async def test_without_a_backend_that_computes_the_prompt_the_request_is_refused_with_the_reason() -> None:
    world = World(meets=True)
    await well(world.gateway, "p0", "a0", "a1")
    world.gateway.cluster.drain("p0")
    _, error, _ = await world.ask()
    assert isinstance(error, NoBackend)
    assert "a0: computes no prompts, and no other backend does so for it" in (error.hint or "")
    await world.close()


@virtually
async def test_an_answer_that_fails_while_its_prompt_is_computed_cancels_that() -> None:
    def breaks(_: Request, prompt: Prompt) -> Answer:
        assert prompt.transfer is not None
        return Answer() if prompt.transfer["room"] else Answer(error=BackendFailed("broke off"))

    world = World(breaks, meets=True)
    world.prompts.seconds = 0.2
    caller, error, _ = await world.ask()
    assert (error, text_of(caller)) == (None, TEXT)
    assert (world.prompts.count("cancelled"), world.prompts.count("done")) == (1, 1)
    assert len(set(caller.placed)) == 2
    await world.close()


@virtually
async def test_a_client_that_leaves_cancels_both_legs() -> None:
    world = World(meets=True)
    world.prompts.seconds = 1000.0
    for answers in world.answers:
        answers.hands_over = 1000.0
    task = asyncio.create_task(world.ask())
    await asyncio.sleep(0.5)
    assert world.prompts.count("begun") == 1
    task.cancel()
    await task
    assert world.prompts.count("cancelled") == 1
    await world.close()


@virtually
async def test_a_first_leg_that_ends_badly_after_the_answer_has_begun_is_not_missed() -> None:
    world = World(Answer(delay_s=0.05), meets=True)
    world.prompts.seconds, world.prompts.failure = 0.1, BackendFailed("broke off")
    caller, error, _ = await world.ask()
    assert (error, text_of(caller)) == (None, TEXT)
    assert world.events == {"prefilled_elsewhere": 1}
    await world.close()
