from __future__ import annotations

import random
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.learning.concurrency import AdaptiveLimit


@dataclass
class Server:
    """Takes `slots` requests at once and queues the rest unseen; clients send as many as `limit` allows.

    A first token takes `ttft_s` once a slot is free, the whole answer `answer_s`, all times `slowness`. What an idle
    server takes is learnt from requests that were not sent into a crowd, as the router does it.
    """

    slots: int
    limit: AdaptiveLimit = field(default_factory=AdaptiveLimit)
    ttft_s: float = 0.2
    answer_s: float = 2.0
    slowness: float = 1.0
    idle_s: float = 0.2
    now: float = 0.0
    in_flight: int = 0
    rng: random.Random = field(default_factory=lambda: random.Random(7))
    events: list[tuple[float, int, int, float]] = field(default_factory=list)
    numbers: count[int] = field(default_factory=count)

    def __post_init__(self) -> None:
        self.free = [0.0] * self.slots
        heapify(self.free)

    def serve(self, answers: int) -> list[int]:
        """The limit after each of so many first tokens."""
        limits: list[int] = []
        while len(limits) < answers:
            while self.in_flight < self.limit.limit:
                self.send()
            self.now, _, crowd, ttft_s = heappop(self.events)
            if crowd:
                self.see(ttft_s, crowd)
                limits.append(self.limit.limit)
            else:
                self.in_flight -= 1
        return limits

    def send(self) -> None:
        self.in_flight += 1
        start = max(self.now, heappop(self.free))
        first_at = start + self.ttft_s * self.slowness * self.rng.uniform(0.9, 1.2)
        end_at = first_at + self.answer_s * self.slowness * self.rng.uniform(0.5, 1.5)
        heappush(self.free, end_at)
        heappush(self.events, (first_at, next(self.numbers), self.in_flight, first_at - self.now))
        heappush(self.events, (end_at, next(self.numbers), 0, 0.0))

    def see(self, ttft_s: float, crowd: int) -> None:
        if not self.limit.is_crowded(crowd):
            self.idle_s += 0.2 * (ttft_s - self.idle_s)
        self.limit.observe(ttft_s / self.idle_s, crowd)
        self.limit.check()


def middle(limits: list[int]) -> int:
    return sorted(limits)[len(limits) // 2]


@pytest.mark.parametrize("slots", [4, 16, 64])
def test_the_limit_finds_how_many_requests_a_server_takes_at_once(slots: int) -> None:
    limits = Server(slots).serve(2000)
    assert slots <= middle(limits[600:]) <= 1.5 * slots


@pytest.mark.parametrize("slots", [1, 2])
def test_a_server_that_takes_one_or_two_at_once_is_found_out_by_probing(slots: int) -> None:
    assert middle(Server(slots).serve(1500)[700:]) <= 4


def test_a_large_server_is_used_within_a_few_rounds() -> None:
    limits = Server(256, answer_s=10.0).serve(160)
    assert max(limits) >= 128


def test_a_server_that_slows_down_gets_less_until_its_new_speed_is_known() -> None:
    server = Server(16)
    before = middle(server.serve(1500)[800:])
    server.slowness = 3.0
    slowed = server.serve(1500)
    assert min(slowed[:100]) <= before / 2
    assert middle(slowed[900:]) == pytest.approx(before, rel=0.4)


def test_a_limit_that_is_not_used_does_not_grow() -> None:
    limit = AdaptiveLimit(initial=32)
    for _ in range(1000):
        limit.observe(1.0, in_flight=3)
    assert limit.limit == 32


def test_a_backend_that_refuses_gets_less() -> None:
    limit = AdaptiveLimit(initial=100)
    limit.refuse()
    assert limit.limit == 70
    for _ in range(50):
        limit.refuse()
    assert limit.limit == 1


def test_one_slow_first_token_in_a_round_changes_nothing() -> None:
    calm, shaken = AdaptiveLimit(), AdaptiveLimit()
    for at in range(8):
        calm.observe(1.0, in_flight=8)
        shaken.observe(300.0 if at == 3 else 1.0, in_flight=8)
    assert shaken.limit == calm.limit == 16


@pytest.mark.parametrize("bounds", [{"initial": 0, "least": 0}, {"initial": 9, "most": 8}, {"initial": 1, "least": 2}])
def test_bounds_must_hold_the_first_limit(bounds: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="1 <= least <= initial <= most"):
        AdaptiveLimit(**bounds)


def test_a_probe_that_others_make_impossible_is_given_up() -> None:
    limit = AdaptiveLimit(16, most=16)
    while not limit.is_probing:
        limit.observe(1.0, 16)
    # those that were there before it began, and then those that are sent among the others'
    for _ in range(16):
        limit.observe(1.0, 12)
        assert limit.limit == 8
    limit.observe(1.0, 12)
    assert limit.limit == 16
    limit.check()


@given(st.lists(st.tuples(st.floats(allow_nan=True), st.integers(0, 10_000), st.booleans()), max_size=300))
def test_whatever_is_seen_the_limit_and_its_memory_stay_in_bounds(seen: list[tuple[float, int, bool]]) -> None:
    limit = AdaptiveLimit(initial=4, least=2, most=64)
    for slowdown, in_flight, refused in seen:
        limit.observe(slowdown, in_flight)
        if refused:
            limit.refuse()
        limit.check()
