from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.learning.concurrency import AdaptiveLimit, Queue


@dataclass
class Server:
    """Takes `slots` requests at once and queues the rest unseen; clients send as many as `limit` allows.

    A first token takes `ttft_s` once a slot is free, the whole answer `answer_s`, all times `slowness`; of each request
    up to `unrest` times that again. What an idle server takes is learnt from requests that were not sent into a crowd,
    as the router does it, unless that `is_known`. It reports its queue once in `reports_every_s`.
    """

    slots: int
    limit: AdaptiveLimit = field(default_factory=AdaptiveLimit)
    ttft_s: float = 0.2
    answer_s: float = 2.0
    slowness: float = 1.0
    unrest: float = 0.0
    idle_s: float = 0.2
    is_known: bool = False
    reports_every_s: float | None = None
    report: Queue | None = None
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
            self.tell()
            if crowd:
                self.see(ttft_s, crowd)
                limits.append(self.limit.limit)
            else:
                self.in_flight -= 1
        return limits

    def tell(self) -> None:
        every_s, queue = self.reports_every_s, self.report
        if every_s is not None and (queue is None or self.now >= queue.at + every_s):
            running = min(self.slots, self.in_flight)
            self.report = Queue(self.now, running, self.in_flight - running)

    def send(self) -> None:
        self.in_flight += 1
        start = max(self.now, heappop(self.free))
        slowness = self.slowness * (1.0 + self.rng.uniform(0.0, self.unrest) if self.unrest else 1.0)
        first_at = start + self.ttft_s * slowness * self.rng.uniform(0.9, 1.2)
        end_at = first_at + self.answer_s * slowness * self.rng.uniform(0.5, 1.5)
        heappush(self.free, end_at)
        heappush(self.events, (first_at, next(self.numbers), self.in_flight, first_at - self.now))
        heappush(self.events, (end_at, next(self.numbers), 0, 0.0))

    def see(self, ttft_s: float, crowd: int) -> None:
        if not self.is_known and not self.limit.is_crowded(crowd):
            self.idle_s += 0.2 * (ttft_s - self.idle_s)
        self.limit.observe(ttft_s / self.idle_s, crowd, self.report)
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


@pytest.mark.parametrize("reports_every_s", [0.1, 1.0, 2.0])
@pytest.mark.parametrize("slots", [1, 2, 6, 16, 64])
def test_of_a_server_that_reports_its_queue_at_most_about_the_root_of_the_limit_waits(
    slots: int, reports_every_s: float
) -> None:
    limits = Server(slots, reports_every_s=reports_every_s).serve(2000)[600:]
    assert slots <= middle(limits) <= slots + math.sqrt(slots) + 3
    assert max(limits) <= 1.5 * slots + 6


@pytest.mark.parametrize("answer_s", [0.05, 2.0])
def test_a_machine_that_is_busy_with_other_work_shrinks_no_limit_of_a_server_that_reports_no_queue(
    answer_s: float,
) -> None:
    unrest = {"unrest": 8.0, "is_known": True, "answer_s": answer_s}
    reporting, silent = Server(32, reports_every_s=1.0, **unrest), Server(32, **unrest)  # type: ignore[arg-type]
    limits = reporting.serve(3000)
    assert min(limits) >= 8
    assert 32 <= middle(limits[1500:]) <= 1.5 * 32
    assert middle(silent.serve(3000)[1500:]) < 8, "first tokens alone show a queue that is not there"


def test_a_request_that_a_report_saw_arriving_is_no_queue() -> None:
    limit = AdaptiveLimit()
    for second in range(400):
        limit.observe(5.0, in_flight=3, queue=Queue(second / 4, running=2, waiting=1))
        assert limit.limit == 8
    limit.check()


def test_between_reports_a_slow_first_token_means_nothing_and_a_fast_one_means_room() -> None:
    slow, fast, queue = AdaptiveLimit(), AdaptiveLimit(), Queue(1.0, running=8, waiting=0)
    for _ in range(64):
        slow.observe(5.0, in_flight=16, queue=queue)
        fast.observe(1.0, in_flight=64, queue=queue)
    assert slow.limit < 12 < 32 <= fast.limit


def test_a_backend_that_reports_no_longer_is_held_to_its_first_tokens_again() -> None:
    limit = AdaptiveLimit()
    for second in range(80):
        limit.observe(5.0, in_flight=16, queue=Queue(float(second), running=8, waiting=0))
    known = limit.limit
    assert known > 8
    for _ in range(320):
        limit.observe(5.0, in_flight=known)
    assert limit.limit < 8


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


QUEUES = st.none() | st.builds(Queue, st.floats(0, 1e6), st.integers(0, 10_000), st.integers(0, 10_000))


@given(st.lists(st.tuples(st.floats(allow_nan=True), st.integers(0, 10_000), st.booleans(), QUEUES), max_size=300))
def test_whatever_is_seen_the_limit_and_its_memory_stay_in_bounds(
    seen: list[tuple[float, int, bool, Queue | None]],
) -> None:
    limit = AdaptiveLimit(initial=4, least=2, most=64)
    for slowdown, in_flight, refused, queue in seen:
        limit.observe(slowdown, in_flight, queue)
        if refused:
            limit.refuse()
        limit.check()
