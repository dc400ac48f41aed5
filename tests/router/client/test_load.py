"""The load of a benchmark, on a virtual clock: when requests are sent, and from when their times count."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.errors import BackendFailed
from router.client.chats import Reply
from router.client.load import Load, Timed, put_load
from tests.virtual_time import run_virtually


class Server:
    """Answers after `seconds`, at most `at_once` requests at a time; every `fails`-th fails."""

    def __init__(self, seconds: float, at_once: int = 1000, fails: int | None = None) -> None:
        self.seconds, self.fails, self.running, self.most, self.prompts = seconds, fails, 0, 0, list[str]()
        self._room = asyncio.Semaphore(at_once)

    async def ask(self, prompt: str) -> Reply:
        began = asyncio.get_running_loop().time()
        self.prompts.append(prompt)
        number = len(self.prompts)
        self.running += 1
        self.most = max(self.most, self.running)
        async with self._room:
            await asyncio.sleep(self.seconds)
        self.running -= 1
        if self.fails and number % self.fails == 0:
            raise BackendFailed("full")
        took = asyncio.get_running_loop().time() - began
        return Reply("x", took, took, 1, None, 1, "stop", {})


def put(load: Load, server: Server) -> tuple[list[Timed], float]:
    """What was measured, and the seconds that it took."""

    async def run() -> tuple[list[Timed], float]:
        loop = asyncio.get_running_loop()
        began, ended = loop.time(), list[Timed]()
        done = await put_load(load, server.ask, loop.time, ended.append)
        assert ended == done
        return done, loop.time() - began

    return run_virtually(run())


def test_a_closed_loop_has_so_many_requests_at_a_time() -> None:
    server = Server(2.0)
    done, took = put(Load(40, concurrency=4), server)
    assert (len(done), server.most, took) == (40, 4, pytest.approx(20.0))
    assert all(timed.ttft_s == pytest.approx(2.0) for timed in done)


def test_a_closed_loop_with_more_clients_than_requests_ends() -> None:
    assert len(put(Load(3, concurrency=100), Server(1.0))[0]) == 3


def test_an_open_loop_does_not_wait_for_answers() -> None:
    server = Server(100.0)
    _, took = put(Load(200, rate=10.0), server)
    assert server.most > 150
    assert took == pytest.approx(120.0, abs=8.0)


def test_times_of_an_open_loop_have_the_wait_at_a_full_server() -> None:
    # 2 requests per second arrive, and 1 is answered: request n waits about n / 2 s
    done, took = put(Load(100, rate=2.0), Server(1.0, at_once=1))
    assert took >= 100.0
    last = done[-1]
    assert last.end_s is not None
    assert last.end_s == pytest.approx(took - last.due_s)
    assert last.end_s > 30.0


def test_requests_that_are_sent_late_are_not_spared_that_time() -> None:
    reply = Reply("x", 0.5, 1.0, 1, None, 3, "stop", {})
    late = Timed(due_s=10.0, sent_s=12.0, reply=reply)
    assert (late.ttft_s, late.end_s) == (2.5, 3.0)
    assert (Timed(0.0, 0.0, failure="no").ttft_s, Timed(0.0, 0.0, failure="no").end_s) == (None, None)


@pytest.mark.parametrize("rate", [None, 5.0])
def test_failures_are_measured_and_end_nothing(rate: float | None) -> None:
    done, _ = put(Load(30, concurrency=3, rate=rate), Server(1.0, fails=10))
    assert [timed.failure for timed in done].count("full") == 3
    assert len(done) == 30


@given(seed=st.integers(0, 100), words=st.integers(1, 300), shared=st.integers(0, 400))
def test_prompts_share_their_beginning_and_nothing_else(seed: int, words: int, shared: int) -> None:
    load = Load(2, words=words, shared_words=shared, seed=seed)
    first, second = (load.prompt(number).split() for number in range(2))
    common = min(shared, words)
    assert first[:common] == second[:common]
    assert len(first) == len(second)
    assert first == Load(9, words=words, shared_words=shared, seed=seed).prompt(0).split()
    if words - common > 20:
        assert first != second
    if common > 20:
        assert first[:common] != Load(2, words=words, shared_words=shared, seed=seed + 1).prompt(0).split()[:common]


def test_arrivals_are_in_order_at_the_rate_and_the_same_for_the_same_seed() -> None:
    load = Load(10_000, rate=50.0, seed=7)
    at = list(load.arrivals())
    assert at == list(load.arrivals())
    assert all(early <= late for early, late in pairwise(at))
    assert len(at) / at[-1] == pytest.approx(50.0, rel=0.05)
