"""A request whose first token is late goes to a second backend too; the first to begin its answer gives all of it."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, cast

import pytest

from backends.fake import Answer, FakeBackend
from policies.errors import BackendErred, BackendFailed, BackendRefused, ExpectedError
from policies.nouns import Prompt, Request, ServiceClass, Usage
from policies.sla.config import Config
from router.call.admission import Permit
from router.call.bid import Placed
from router.call.gateway import Gateway
from router.call.hedging import Beaten, Race
from router.protocols.openai.request import chat_ask
from tests.router.callers import Listener, ended, well
from tests.router.parts import MODEL, a_chat, a_config, built
from tests.virtual_time import run_virtually

TTFT_S = 0.1
SLOW_S = 5.0

QUICK = Answer(("a", "b"), delay_s=TTFT_S)
SLOW = Answer(("slow",), delay_s=SLOW_S)
HANGS = Answer(hangs_at=0)

Scripted = Callable[[int, str], Answer]
"""From how many backends had the request before, and the name of the one that has it now."""


def usual(tries: int, backend: str) -> Answer:
    return QUICK


class World:
    """A gateway in virtual time with some backends, which know by now how fast they are."""

    def __init__(self, backends: int = 3, hedge: float | None = 0.95, budget: float = 1.0) -> None:
        self.script: Scripted = usual
        self.spent: list[Usage] = []
        self.events: Counter[str] = Counter()
        self._tries: Counter[str] = Counter()
        self._asked = 0
        self.backends = [
            FakeBackend(f"b{at}", models=frozenset({MODEL}), script=self._answer(at)) for at in range(backends)
        ]
        service_class = ServiceClass("chat", 0, hedge_quantile=hedge, hedge_budget=budget)
        clock = asyncio.get_running_loop().time
        config: Config = replace(a_config(), classes={"chat": service_class})
        self.gateway: Gateway = built(
            config, backends=lambda _: self.backends, rng=random.Random(1), clock=clock
        ).gateway
        self.gateway.observer.event = lambda name: self.events.update([name])  # type: ignore[method-assign]
        close = self.gateway.admission.close

        def noted(permit: Permit) -> None:
            if permit.usage is not None:
                self.spent.append(permit.usage)
            close(permit)

        self.gateway.admission.close = noted  # type: ignore[method-assign]

    def _answer(self, at: int) -> Callable[[Request, Prompt], Answer]:
        def answer(request: Request, _: Prompt) -> Answer:
            tries = self._tries[request.id]
            self._tries[request.id] += 1
            return self.script(tries, f"b{at}")

        return answer

    async def learn(self, requests: int = 60) -> None:
        """Let all backends answer some requests."""
        await well(self.gateway, *(backend.name for backend in self.backends))
        for _ in range(requests):
            await self.ask()
        for backend in self.backends:
            assert backend.finished >= 10, f"{backend} learnt too little"
        self.spent.clear()
        self.events.clear()

    async def ask(self, *, stream: bool = True, hangs_up_after: int | None = None) -> tuple[Listener, Any, float]:
        """Send a request: its client, how it ended, and the seconds that it took."""
        caller = Listener(chat_ask(a_chat(stream=stream)), hangs_up_after=hangs_up_after)
        caller.id, self._asked = f"r{self._asked}", self._asked + 1
        began_at = self.gateway.clock()
        error = await ended(caller, self.gateway)
        return caller, error, self.gateway.clock() - began_at

    @property
    def second_requests(self) -> int:
        return sum(max(0, tries - 1) for tries in self._tries.values())

    async def close(self) -> None:
        """Assert that nothing is left anywhere."""
        self.gateway.check()
        for backend in self.backends:
            backend.check()
            assert backend.open_requests == 0, backend
        await self.gateway.tokenizers.close()


def virtually(scenario: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def test() -> None:
        run_virtually(scenario())

    test.__name__, test.__doc__ = scenario.__name__, scenario.__doc__
    return test


def first_try(first: Answer, then: Answer = QUICK) -> Scripted:
    """The backend that has a request first answers `first`, any other `then`."""
    return lambda tries, _: then if tries else first


def text_of(caller: Listener) -> str:
    return "".join(delta.text for delta in caller.heard)


@virtually
async def test_a_second_backend_answers_a_request_that_is_late() -> None:
    world = World()
    await world.learn()
    world.script = first_try(HANGS)
    caller, error, seconds = await world.ask()
    assert error is None
    assert text_of(caller) == "ab"
    first, second = caller.placed
    assert first != second
    assert seconds < 6 * TTFT_S
    assert world.events == {"hedged": 1, "hedge_won": 1}
    prompt_tokens = world.backends[0].received[-1][0].prompt_tokens
    assert world.spent == [Usage(prompt_tokens, 2, 0, backend_ms=world.spent[0].backend_ms)]
    assert sum(backend.cancelled for backend in world.backends) == 1
    await world.close()


@virtually
async def test_a_slower_backend_is_the_second_once_the_first_was_waited_for_half_as_long() -> None:
    world = World(backends=2)
    await world.learn()
    world.script = lambda _, backend: QUICK if backend == "b0" else Answer(("c",), delay_s=9 * TTFT_S)
    for _ in range(60):
        await world.ask()
    world.script = lambda tries, _: Answer(("c",), delay_s=9 * TTFT_S) if tries else HANGS
    caller, error, seconds = await world.ask()
    assert (error, text_of(caller)) == (None, "c")
    assert caller.placed == ["b0", "b1"]
    # the second is predicted to take 9 TTFT_S, and begins once the first was waited for from half to all of that
    assert 1.4 * 9 * TTFT_S < seconds < 2.3 * 9 * TTFT_S
    await world.close()


@virtually
async def test_the_first_backend_may_still_win_and_the_second_is_cancelled_and_not_charged() -> None:
    world = World()
    await world.learn()
    world.script = first_try(Answer(("late",), delay_s=2.5 * TTFT_S), SLOW)
    caller, error, seconds = await world.ask()
    assert (error, text_of(caller), len(caller.placed)) == (None, "late", 1)
    assert seconds < SLOW_S
    assert world.events == {"hedged": 1}
    assert [used.completion_tokens for used in world.spent] == [1]
    assert sum(backend.cancelled for backend in world.backends) == 1
    await world.close()


@virtually
async def test_a_request_that_is_in_time_has_no_second_one() -> None:
    world = World()
    await world.learn()
    for stream in (True, False):
        caller, _, _ = await world.ask(stream=stream)
        assert text_of(caller) == "ab"
    assert (world.second_requests, world.events) == (0, {})
    await world.close()


@virtually
async def test_a_class_without_hedging_waits() -> None:
    world = World(hedge=None)
    await world.learn()
    world.script = first_try(SLOW)
    caller, _, seconds = await world.ask()
    assert (text_of(caller), world.second_requests) == ("slow", 0)
    assert seconds >= SLOW_S
    await world.close()


@virtually
async def test_an_answer_in_one_piece_has_a_second_backend_too() -> None:
    world = World()
    await world.learn()
    world.script = first_try(HANGS)
    caller, error, _ = await world.ask(stream=False)
    assert (error, text_of(caller), world.events["hedge_won"]) == (None, "ab", 1)
    await world.close()


@virtually
async def test_second_requests_stay_within_the_budget() -> None:
    world = World(budget=0.1)
    await world.learn(60)
    world.script = first_try(SLOW)
    for _ in range(100):
        await world.ask()
    # what the first 60 requests earned too
    assert 6 <= world.second_requests <= 16
    await world.close()


@virtually
async def test_no_second_request_before_it_is_known_what_is_late() -> None:
    world = World()
    await well(world.gateway, "b0", "b1", "b2")
    world.script = first_try(SLOW)
    for _ in range(5):
        await world.ask()
    assert world.second_requests == 0
    await world.close()


@virtually
async def test_a_request_at_a_backend_that_never_answered_is_late_by_what_its_peers_teach_meanwhile() -> None:
    world = World(backends=2)
    await well(world.gateway, "b0", "b1")
    first: list[str] = []

    def one_hangs(_: int, backend: str) -> Answer:
        if not first:
            first.append(backend)
        return HANGS if backend == first[0] else QUICK

    world.script = one_hangs
    waiting = asyncio.create_task(world.ask())
    await asyncio.sleep(0.01)
    world.gateway.cluster.drain(first[0])
    for _ in range(20):
        await world.ask()
    caller, error, seconds = await waiting
    assert error is None
    assert text_of(caller) == "ab"
    assert 2.0 <= seconds < 4.5
    assert world.events["hedge_won"] == 1
    await world.close()


@virtually
async def test_no_second_request_without_another_backend() -> None:
    world = World(backends=1)
    await world.learn(20)
    world.script = first_try(SLOW)
    caller, _, _ = await world.ask()
    assert (text_of(caller), world.second_requests) == ("slow", 0)
    await world.close()


@virtually
async def test_where_the_first_fails_the_second_goes_on() -> None:
    world = World()
    await world.learn()
    gone = Answer((), delay_s=3 * TTFT_S, error=BackendFailed("gone"))
    world.script = first_try(gone, Answer(("b",), delay_s=SLOW_S))
    caller, error, _ = await world.ask()
    assert (error, text_of(caller)) == (None, "b")
    assert (world.second_requests, world.events) == (1, {"hedged": 1, "hedge_won": 1})
    await world.close()


@pytest.mark.parametrize("failure", [BackendFailed("gone"), BackendErred("500"), BackendRefused("no")], ids=repr)
def test_where_the_second_fails_the_first_goes_on(failure: ExpectedError) -> None:
    async def scenario() -> None:
        world = World()
        await world.learn()
        world.script = first_try(SLOW, Answer((), error=failure))
        caller, error, _ = await world.ask()
        assert (error, text_of(caller), len(caller.placed)) == (None, "slow", 1)
        assert world.second_requests == 1
        await world.close()

    run_virtually(scenario())


def test_a_mistake_in_the_second_request_is_logged_and_harms_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        world = World()
        await world.learn()
        mistake: Any = ZeroDivisionError("a mistake")
        world.script = first_try(SLOW, Answer((), error=mistake))
        caller, error, _ = await world.ask()
        assert (error, text_of(caller)) == (None, "slow")
        await world.gateway.tokenizers.close()

    run_virtually(scenario())
    assert "a second request failed by an unplanned exception" in caplog.text
    assert "ZeroDivisionError: a mistake" in caplog.text


@virtually
async def test_the_one_that_is_beaten_cannot_lead() -> None:
    first, second = cast("Placed", object()), cast("Placed", object())
    nothing = cast("Any", None)
    race = Race(first, nothing, find_second=nothing, on_won=nothing, late_s=1.0)
    race.lead(first)
    with pytest.raises(Beaten):
        race.lead(second)
    assert race.placed is first


@virtually
async def test_where_both_fail_a_third_backend_answers() -> None:
    world = World()
    await world.learn()
    fails = Answer((), delay_s=3 * TTFT_S, error=BackendFailed("gone"))
    world.script = lambda tries, _: fails if tries < 2 else QUICK
    caller, error, _ = await world.ask()
    assert (error, text_of(caller)) == (None, "ab")
    assert caller.placed[-1] not in caller.placed[:-1]
    assert world.events["retried"] == 1
    await world.close()


@virtually
async def test_an_error_of_the_request_ends_both() -> None:
    world = World()
    await world.learn()
    world.script = first_try(Answer((), delay_s=3 * TTFT_S, error=BackendRefused("no such thing")), SLOW)
    _, error, seconds = await world.ask()
    assert isinstance(error, BackendRefused)
    assert seconds < SLOW_S
    await world.close()


@pytest.mark.parametrize("after_s", [0.5 * TTFT_S, 2.5 * TTFT_S, 3.5 * TTFT_S], ids=["alone", "racing", "won"])
def test_a_client_that_leaves_ends_both(after_s: float) -> None:
    async def scenario() -> None:
        world = World()
        await world.learn()
        world.script = first_try(HANGS, Answer(("a", "b", "c"), delay_s=1.5 * TTFT_S))
        asked = asyncio.create_task(world.ask())
        await asyncio.sleep(after_s)
        asked.cancel()
        _, error, _ = await asked
        assert isinstance(error, asyncio.CancelledError)
        await world.close()

    run_virtually(scenario())


@virtually
async def test_a_winner_that_is_cut_off_is_continued_elsewhere() -> None:
    world = World()
    await world.learn()
    cut = Answer(("a", "b", "c"), delay_s=TTFT_S, error=BackendFailed("cut"), error_at=2)
    world.script = lambda tries, _: (HANGS, cut, Answer(("a", "b", "c"), delay_s=TTFT_S))[tries]
    caller, error, _ = await world.ask()
    assert (error, text_of(caller)) == (None, "abc")
    assert [used.completion_tokens for used in world.spent] == [3]
    await world.close()


@virtually
async def test_the_tail_shrinks_and_the_load_hardly_grows() -> None:
    """One request in 50 takes 5 s instead of 0.1 s."""

    async def tail(hedge: float | None) -> tuple[float, int]:
        world, rng = World(hedge=hedge, budget=0.05), random.Random(3)
        await world.learn()
        world.script = lambda tries, backend: SLOW if rng.random() < 0.02 else QUICK
        times = sorted([(await world.ask())[2] for _ in range(1000)])
        await world.close()
        return times[989], world.second_requests

    without, none = await tail(None)
    hedged, second_requests = await tail(0.95)
    assert none == 0
    assert without >= SLOW_S
    assert hedged < SLOW_S / 5
    assert second_requests <= 0.05 * 1060
