"""Requests with one backend that is ill or on trial: no spill, no other pool, the real router."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from backends.fake import Answer, FakeBackend
from policies.errors import BackendFailed, ExpectedError, Unreached
from router.call.bid import MOST_TRIES
from router.fleet.cluster.cluster import Cluster
from router.protocols.openai.request import chat_ask
from tests.router.call.test_sla_kept import TWO_POOLS, Crowd, Stopwatch, a_router
from tests.virtual_time import run_virtually

FAILURES_UNTIL_ILL = 3


def at_one_backend(
    *, back_at: float, steps: str = "", target: str = "12s", failure: Callable[[], ExpectedError], others: float = 0.0
) -> tuple[list[Stopwatch], FakeBackend]:
    """Three requests, of which the last makes the only backend ill; it fails all until `back_at`, and is probed.

    So many `others` a second come in the meantime.
    """
    crowd = Crowd("ACME", others or 1.0)
    text = TWO_POOLS.replace("800ms", target) + (f"on_miss: {{interactive: {steps}}}\n" if steps else "")

    async def run() -> None:
        loop = asyncio.get_running_loop()

        def script(*_: object) -> Answer:
            return Answer(("a", "b"), error=failure() if loop.time() < back_at else None)

        backend = FakeBackend("own-0", "own", script)
        fleet.append(backend)
        async with a_router(text, [backend]) as gateway:
            probing = asyncio.create_task(probe(gateway.cluster))
            for _ in range(FAILURES_UNTIL_ILL):
                ask = chat_ask({"model": "fake", "messages": [{"role": "user", "content": "hello"}]}, {})
                crowd.calls.append(Stopwatch(next(gateway.ids), "ACME", ask, loop.time()))
                if len(crowd.calls) == FAILURES_UNTIL_ILL and others:
                    coming = asyncio.create_task(crowd.come(gateway, 3.0, 1))
                await crowd.run_call(crowd.calls[len(crowd.calls) - 1], gateway)
            if others:
                await coming
            probing.cancel()
            assert gateway.dispatcher.is_idle()

    fleet: list[FakeBackend] = []
    run_virtually(run())
    return crowd.calls, fleet[0]


async def probe(cluster: Cluster) -> None:
    while True:
        await asyncio.sleep(0.2)
        await cluster.probe("own-0")


def away() -> ExpectedError:
    return Unreached("own-0 cannot be reached")


def broken() -> ExpectedError:
    return BackendFailed("own-0 broke off")


def test_a_request_that_makes_its_only_backend_ill_waits_for_it_and_is_answered() -> None:
    calls, backend = at_one_backend(back_at=2.5, failure=away)
    assert [call.refused.code if call.refused else None for call in calls] == ["backend_failed"] * 2 + [None]
    assert 2.5 <= calls[-1].ttft_s < 8.0
    assert len(backend.received) > FAILURES_UNTIL_ILL + 1, "it was on trial more than once"


@pytest.mark.parametrize(
    ("steps", "target", "waits_s"),
    [("", "800ms", 10.0), ("[shed]", "800ms", 0.8), ("[shed]", "4s", 4.0), ("[{queue: 3s}, shed]", "800ms", 3.0)],
)
def test_it_waits_as_long_as_its_promise_lets_it_and_then_hears_of_the_failure(
    steps: str, target: str, waits_s: float
) -> None:
    calls, _ = at_one_backend(back_at=60.0, steps=steps, target=target, failure=away)
    assert isinstance(calls[-1].refused, Unreached)
    assert calls[-1].over_at - calls[-1].came_at == pytest.approx(waits_s, abs=0.5)


def test_what_breaks_its_backend_each_time_is_tried_there_no_more_often_than_elsewhere() -> None:
    calls, backend = at_one_backend(back_at=60.0, failure=broken)
    assert isinstance(calls[-1].refused, BackendFailed)
    assert len(backend.received) == FAILURES_UNTIL_ILL - 1 + MOST_TRIES


def test_while_one_is_on_trial_the_others_wait_for_it() -> None:
    calls, backend = at_one_backend(back_at=3.0, failure=away, others=10.0)
    assert len(calls) > 20
    assert [call.refused for call in calls[2:] if call.refused] == []
    trials = len(backend.received) - len(calls)
    assert trials < 6, "the others were not all sent to fail"
