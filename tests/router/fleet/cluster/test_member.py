"""A backend that computes one prompt after the other, on a clock of its own, as its Member comes to know it."""

from __future__ import annotations

import asyncio
import math
import random
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import pytest

from backends.base import Description, Load
from backends.fake import FakeBackend
from policies.compose import under_limit
from policies.errors import BackendFailed, Overloaded
from policies.learning.cost import TYPICAL, Latency, Work, prefill_work
from policies.nouns import Delta, Usage
from policies.predict import predicted_ttft_s
from policies.rules import BACKGROUND_RANK
from router.fleet.cluster.flights import Elsewhere, Flight, Front, Traffic
from router.fleet.cluster.member import Member, _of_equals
from tests.policies.builders import a_request

SPEED = Latency(fixed_s=0.05, token_s=1e-3, pair_s=1e-8, queue=1.0, step_s=0.02, sequence_s=1e-3, context_s=1e-7)
SHARD = Description(frozenset({"llama"}), reports_cache=True, preempts=True)


@dataclass
class Described(FakeBackend):
    """A fake that says what a test wants it to say."""

    says: Description | None = SHARD

    def describe(self) -> Description | None:
        return self.says


def a_member(says: Description | None = SHARD, **reported: Any) -> Member:
    member = Member(Described("b0", says=says, reported=Load(**reported)))
    member.probed(None, now=0.0)
    return member


@dataclass
class Serial:
    """Sends to `member`; its backend computes one prompt after the other and then decodes all together."""

    member: Member
    speed: Latency = SPEED
    now: float = 0.0
    free_at: float = 0.0
    first_try: bool = True
    sent: list[Flight] = field(default_factory=list)

    def send(self, tokens: int, *, held: int = 0, **what: Any) -> tuple[Flight, float]:
        """The flight of a prompt, and when its first token will be there."""
        request = a_request(prompt_tokens=tokens + held, **what)
        flight = self.member.begin(request, tokens, now=self.now, is_first_try=self.first_try)
        self.free_at = max(self.now, self.free_at) + self.speed.prefill_s(tokens, held)
        return flight, self.free_at

    def answer(self, flight: Flight, at: float, *, tokens: int = 20, failure: Exception | None = None) -> None:
        """Its answer comes from `at` on, and it ends."""
        batch, step_s = 1, 0.0
        for number in range(tokens):
            context_tokens = flight.request.prompt_tokens + number
            step_s = self.speed.tpot_s(batch, context_tokens) if number else 0.0
            at += step_s
            flight.heard(Delta(token_ids=(7,)), at)
        self.now = max(self.now, at)
        self.member.end(flight, failure, now=self.now)

    def ask(self, tokens: int, **what: Any) -> Flight:
        """One prompt, answered before the next is sent."""
        flight, at = self.send(tokens)
        self.answer(flight, at, **what)
        self.now += 1.0
        return flight


def test_a_new_backend_is_as_fast_as_its_kind_or_as_it_reports() -> None:
    assert a_member().view(0.0, {}).latency == TYPICAL
    assert a_member(prefill_s_per_token=2e-3).view(0.0, {}).latency.token_s == pytest.approx(2e-3)


def test_a_request_that_was_cancelled_before_its_first_token_was_at_least_so_slow() -> None:
    serial = Serial(a_member())
    for _ in range(30):
        serial.ask(1000)
    flight, _ = serial.send(1000)
    usual_s = serial.member.late_s(flight, 0.95)
    assert usual_s is not None
    serial.member.end(flight, asyncio.CancelledError(), now=serial.now + 0.5 * flight.predicted_ttft_s)
    assert serial.member.late_s(flight, 0.95) == usual_s, "it was not late yet"
    for _ in range(3):
        flight, _ = serial.send(1000)
        serial.now += 10 * flight.predicted_ttft_s
        serial.member.end(flight, asyncio.CancelledError(), now=serial.now)
    late_s = serial.member.late_s(flight, 0.95)
    assert late_s is not None
    assert late_s > 2 * usual_s


def test_nothing_is_late_where_the_first_token_is_not_seen() -> None:
    serial = Serial(a_member(replace(SHARD, may_answer_whole=True)))
    for _ in range(30):
        serial.ask(1000)
    flight, _ = serial.send(1000, stream=False)
    assert serial.member.late_s(flight, 0.95) is None
    serial.member.end(flight, None, now=serial.now)


def test_a_backend_is_known_after_a_few_answers() -> None:
    serial = Serial(a_member())
    for tokens in (300, 5000, 40, 1000, 20_000, 2000, 700, 90, 9000, 3000) * 2:
        serial.ask(tokens)
    view = serial.member.view(serial.now, {})
    for tokens in (100, 1000, 10_000):
        request = a_request(prompt_tokens=tokens)
        assert predicted_ttft_s(request, view) == pytest.approx(SPEED.ttft_s(tokens), rel=0.15)
    assert view.latency.tpot_s(1, 3000) == pytest.approx(SPEED.tpot_s(1, 3000), rel=0.15)
    assert serial.member.model.error < 0.2
    serial.member.check()


def test_prompts_in_front_are_waited_for_less_what_was_computed_of_them() -> None:
    member = a_member(says=replace(SHARD, preempts=False))
    serial = Serial(member)
    for tokens in (300, 5000, 40, 1000, 2000, 700) * 3:
        serial.ask(tokens)
    _, done_at = serial.send(4000)
    left_s = done_at - serial.now
    assert member.view(serial.now, {}).queue_s == pytest.approx(left_s, rel=0.2)
    serial.now += left_s / 2
    assert member.view(serial.now, {}).queue_s == pytest.approx(left_s / 2, rel=0.4)
    serial.now += left_s
    assert member.view(serial.now, {}).queue_s == 0.0


def test_a_report_of_what_waits_counts_for_what_others_sent() -> None:
    member = a_member(waiting_tokens=5000, reported_at=1.0)
    before = member.view(1.0, {})
    assert before.queue_s == pytest.approx(5000 * TYPICAL.token_s)
    member.begin(a_request(prompt_tokens=1000), 1000, now=2.0, is_first_try=True)
    assert member.view(2.0, {}).queue_s == pytest.approx(before.queue_s + TYPICAL.work_s(prefill_work(1000)))


def test_a_request_joins_those_that_run_and_those_that_wait() -> None:
    member = a_member(running=2, waiting=3, reported_at=1.0)
    flight = member.begin(a_request(prompt_tokens=100), 100, now=2.0, is_first_try=True)
    assert (flight.crowd, flight.own_crowd) == (6, 1)
    # the report does not know of the first one
    assert member.begin(a_request(prompt_tokens=100), 100, now=2.0, is_first_try=True).crowd == 7


def test_worse_ranks_are_in_front_of_no_request_where_ranks_are_served() -> None:
    member = a_member()
    member.begin(a_request(prompt_tokens=1000, rank=2), 1000, now=0.0, is_first_try=True)
    assert member.view(0.0, {}, rank=1).queue_s == 0.0
    assert member.view(0.0, {}, rank=2).queue_s > 0.0
    plain = a_member(says=replace(SHARD, preempts=False))
    plain.begin(a_request(prompt_tokens=1000, rank=2), 1000, now=0.0, is_first_try=True)
    assert plain.view(0.0, {}, rank=1).queue_s > 0.0


def test_only_a_backend_that_preempts_has_something_to_reclaim() -> None:
    for preempts, reclaimable in ((True, (1, 1000)), (False, (0, 0))):
        member = a_member(says=replace(SHARD, preempts=preempts))
        member.begin(a_request(prompt_tokens=1000, rank=2, preemptible=True), 1000, now=0.0, is_first_try=True)
        seen = member.view(0.0, {}, rank=0)
        assert (seen.reclaimable_requests, seen.reclaimable_tokens) == reclaimable
        assert member.view(0.0, {}).reclaimable_tokens == 0


@pytest.mark.parametrize("failure", [BackendFailed("gone"), Overloaded("busy")])
def test_nothing_is_learnt_from_what_failed_or_was_retried_or_never_began(failure: Exception) -> None:
    serial = Serial(a_member())
    flight, at = serial.send(1000)
    serial.answer(flight, at, tokens=0)
    serial.answer(serial.send(1000)[0], at, tokens=0, failure=failure)
    serial.first_try = False
    serial.ask(1000)
    assert serial.member.model.snapshot() == TYPICAL
    assert serial.member.model.error == 0.0


def test_an_answer_that_fails_halfway_teaches_its_first_token_alone() -> None:
    serial = Serial(a_member())
    flight, at = serial.send(1000)
    serial.answer(flight, at, failure=BackendFailed("gone"))
    learnt = serial.member.model.snapshot()
    assert learnt.token_s != TYPICAL.token_s
    assert learnt.step_s == TYPICAL.step_s


def test_with_an_unknown_cache_the_computed_tokens_come_from_usage() -> None:
    member = a_member(says=Description(frozenset({"llama"})))
    speed = msgspec.structs.replace(SPEED, pair_s=0.0)
    now = 0.0
    for tokens, cached in ((1000, 900), (4000, 0), (3000, 2990), (200, 100), (5000, 3000)) * 6:
        flight = member.begin(a_request(prompt_tokens=tokens), tokens, now=now, is_first_try=True)
        now += speed.ttft_s(tokens - cached)
        flight.heard(Delta(text="a"), now)
        flight.heard(Delta(text="b"), now + 0.1)
        flight.heard(Delta(finish_reason="stop", usage=Usage(tokens, 2, cached)), now + 0.1)
        member.end(flight, None, now=now + 0.1)
        now += 1.0
    assert member.model.snapshot().ttft_s(2000) == pytest.approx(speed.ttft_s(2000), rel=0.15)


def test_an_answer_in_one_piece_teaches_nothing_about_first_tokens() -> None:
    member = a_member(says=Description(frozenset({"llama"})))
    flight = member.begin(a_request(), 1000, now=0.0, is_first_try=True)
    flight.heard(Delta(text="all of it"), 9.0)
    flight.heard(Delta(finish_reason="stop", usage=Usage(1000, 200, 0)), 9.0)
    member.end(flight, None, now=9.0)
    assert member.model.snapshot() == TYPICAL


def test_only_a_backend_without_a_reported_limit_gets_one_and_loses_some_when_it_refuses() -> None:
    assert a_member(max_requests=4).view(0.0, {}).adaptive_limit is None
    member = a_member()
    before = member.view(0.0, {}).adaptive_limit
    assert before is not None
    flight = member.begin(a_request(), 1000, now=0.0, is_first_try=True)
    member.end(flight, Overloaded("full"), now=1.0)
    after = member.view(1.0, {}).adaptive_limit
    assert after is not None
    assert after < before


def test_a_crowd_teaches_the_limit_and_not_the_speed() -> None:
    member = a_member()
    flights = [member.begin(a_request(prompt_tokens=10), 10, now=0.0, is_first_try=True) for _ in range(12)]
    for flight in reversed(flights):
        flight.heard(Delta(token_ids=(1,)), 30.0)
    assert [flight.crowd for flight in flights] == list(range(1, 13))
    assert member.limit.limit < 8
    assert member.model.observations <= 4


def test_the_prediction_and_the_outcome_are_reported() -> None:
    heard: list[tuple[str, float, float]] = []
    member = Member(Described("b0"), on_predicted=lambda *what: heard.append(what))
    flight = member.begin(a_request(prompt_tokens=1000), 1000, now=5.0, is_first_try=True)
    flight.heard(Delta(token_ids=(1,)), 7.0)
    assert heard == [("b0", pytest.approx(TYPICAL.ttft_s(1000)), 2.0)]


WHOLE = Description(frozenset({"llama"}), may_answer_whole=True)


def test_an_answer_asked_whole_is_presumed_to_decode_once_its_first_token_was_due() -> None:
    reported: list[str] = []
    member = a_member(says=WHOLE)
    member.on_predicted = lambda name, *_: reported.append(name)
    flight = member.begin(a_request(prompt_tokens=1000), 1000, now=0.0, is_first_try=True)
    other = member.begin(a_request(prompt_tokens=1000, stream=True), 1000, now=0.0, is_first_try=True)
    assert (member.view(0.0, {}).waiting, member.view(60.0, {}).waiting) == (2, 1)
    flight.heard(Delta(body=b"{}", tokens=50, is_whole=True), 61.0)
    flight.heard(Delta(usage=Usage(1000, 50)), 61.0)
    member.end(flight, None, now=61.0)
    assert reported == [], "its first token was not seen"
    assert member.model.error == 0.0
    member.end(other, None, now=61.0)
    member.check()


def test_an_answer_in_one_piece_without_a_number_of_tokens_teaches_nothing() -> None:
    member = a_member(says=WHOLE)
    flight = member.begin(a_request(prompt_tokens=1000), 1000, now=0.0, is_first_try=True)
    flight.heard(Delta(body=b"{}", is_whole=True), 61.0)
    flight.heard(Delta(usage=Usage(1000, 1)), 61.0)
    member.end(flight, None, now=61.0)
    assert member.model.snapshot() == TYPICAL


@dataclass
class Seats:
    """A backend that answers in one piece, on a clock of its own: as many requests side by side as it has `seats`, the
    others wait in order. Of each prompt it holds `cached` tokens, and tells so in the end. If it `reports`, it tells
    once a second how many run and wait.
    """

    member: Member
    seats: int = 1
    cached: int = 0
    reports: bool = False
    now: float = 0.0
    at_work: list[tuple[float, int, Flight]] = field(default_factory=list)
    waiting: list[tuple[Flight, int]] = field(default_factory=list)
    sent: int = 0

    def send(self, tokens: int, answer: int) -> None:
        """A prompt of so many tokens, for an answer of so many."""
        flight = self.member.begin(a_request(prompt_tokens=tokens), tokens, now=self.now, is_first_try=True)
        self.waiting.append((flight, answer))
        self._sit_down()

    def answer(self) -> None:
        """Go on until the next answer is there."""
        self.at_work.sort(key=lambda work: work[0])
        self.now, tokens, flight = self.at_work.pop(0)
        backend = self.member.backend
        if self.reports and self.now >= (backend.load().reported_at or 0.0) + 1.0:
            # just before this one ended: what is sent now is not in it
            running, at = len(self.at_work) + 1, self.now - 1e-3
            report = Load(running=running, waiting=len(self.waiting), reported_at=at)
            backend.reported = report  # type: ignore[attr-defined]
        flight.heard(Delta(body=b"{}", tokens=tokens, finish_reason="stop", is_whole=True), self.now)
        flight.heard(Delta(usage=Usage(flight.request.prompt_tokens, tokens, self.cached)), self.now)
        self.member.end(flight, None, now=self.now)
        self._sit_down()

    def _sit_down(self) -> None:
        while self.waiting and len(self.at_work) < self.seats:
            flight, tokens = self.waiting.pop(0)
            prompt_tokens = flight.request.prompt_tokens
            prefill_s = SPEED.prefill_s(prompt_tokens - self.cached, self.cached)
            step_s = SPEED.tpot_s(len(self.at_work) + 1, (len(self.at_work) + 1) * prompt_tokens)
            self.at_work.append((self.now + prefill_s + (tokens - 1) * step_s, tokens, flight))


@pytest.mark.parametrize("cached", [0, 30])
def test_a_backend_that_only_answers_in_one_piece_is_known_after_some_answers(cached: int) -> None:
    seats = Seats(a_member(says=WHOLE), cached=cached)
    for tokens, answer in ((300, 20), (5000, 8), (40, 200), (1000, 60), (20_000, 5), (2000, 400), (90, 9)) * 8:
        seats.send(tokens, answer)
        seats.answer()
        seats.now += 1.0
        seats.member.check()
    latency = seats.member.view(seats.now, {}).latency
    for tokens in (100, 1000, 10_000):
        assert latency.ttft_s(tokens) == pytest.approx(SPEED.ttft_s(tokens), rel=0.25)
    assert latency.tpot_s(1, 2000) == pytest.approx(SPEED.tpot_s(1, 2000), rel=0.25)


@pytest.mark.parametrize("seats", [2, 6, 40])
def test_the_limit_of_a_backend_that_only_answers_in_one_piece_is_found(seats: int) -> None:
    rng, served = random.Random(seats), Seats(a_member(says=WHOLE), seats=seats)
    room, limits = under_limit(), []
    for number in range(4000):
        while room(a_request(), served.member.view(served.now, {})) and len(served.member.flights) < 500:
            served.send(rng.choice((200, 500, 1000)), rng.randint(50, 200))
        served.answer()
        if number > 2000:
            limits.append(served.member.limit.limit)
    served.member.check()
    usual = sorted(limits)[len(limits) // 2]
    # what waits shows in the whole time less than in a first token's: small limits come out higher than the seats
    assert 0.5 * seats <= usual <= 3 * seats + 6


@pytest.mark.parametrize("seats", [2, 6, 40])
def test_the_limit_of_a_backend_that_reports_its_queue_is_found_from_whole_answers_too(seats: int) -> None:
    rng, served = random.Random(seats), Seats(a_member(says=WHOLE), seats=seats, reports=True)
    room, limits = under_limit(), []
    for number in range(3000):
        while room(a_request(), served.member.view(served.now, {})) and len(served.member.flights) < 500:
            served.send(rng.choice((200, 500, 1000)), rng.randint(50, 200))
        served.answer()
        if number > 1000:
            limits.append(served.member.limit.limit)
    served.member.check()
    assert seats <= sorted(limits)[len(limits) // 2] <= 1.5 * seats + 5


def test_slow_first_tokens_of_a_backend_that_reports_no_queue_do_not_shrink_its_limit() -> None:
    limits = {}
    for tells in (True, False):
        serial = Serial(a_member())
        for _ in range(20):
            serial.ask(1000)
        for _ in range(12):
            serial.ask(1000)
            reported = Load(running=0, waiting=0, reported_at=serial.now - 0.5) if tells else Load()
            serial.member.backend.reported = reported  # type: ignore[attr-defined]
            for flight in [serial.send(1000)[0] for _ in range(8)]:
                flight.heard(Delta(token_ids=(7,)), serial.now + 60.0)
                serial.member.end(flight, None, now=serial.now + 60.0)
            serial.now += 61.0
        limits[tells] = serial.member.limit.limit
    assert limits[True] > 8 > limits[False]


def test_a_backend_on_trial_that_answers_in_one_piece_is_well_again() -> None:
    member = a_member(says=WHOLE)
    now = 0.0
    while member.healthy:
        now += 1.0
        member.probed(BackendFailed("gone"), now=now)
    while not member.health.is_on_trial:
        now += 1.0
        member.probed(None, now=now)
    flight = member.begin(a_request(prompt_tokens=100), 100, now=now, is_first_try=True)
    flight.heard(Delta(body=b"{}", tokens=5, is_whole=True), now + 1.0)
    member.end(flight, None, now=now + 1.0)
    assert member.health.is_well
    member.check()


@pytest.mark.parametrize("tokens", [1.0, 100.0, 5000.0, math.inf])
def test_what_others_sent_is_taken_to_be_prompts_of_one_length(tokens: float) -> None:
    member, theirs = a_member(), prefill_work(500)
    waiting = Traffic(waiting=8, waiting_tokens=8 * 500, waiting_pairs=8 * theirs.pairs)
    member.elsewhere = Elsewhere(waiting, busy_since=1.0)
    view = member.view(1.0, {}, prompt_tokens=tokens)
    assert view.queue_s == pytest.approx(view.latency.queue_s(Front([theirs] * 8).ahead_of(tokens)))


def others_wait(member: Member, since: float, count: int = 2) -> float:
    """Others have sent `count` prompts of 500 tokens; the seconds that they take."""
    flight = prefill_work(500)
    member.elsewhere = Elsewhere(Traffic(0, count, count * 500, count * flight.pairs), since)
    return count * member.model.snapshot().work_s(flight)


def test_requests_of_other_routers_are_computed_though_their_news_are_late() -> None:
    member = a_member()
    took_s = others_wait(member, since=10.0)
    assert member.view(10.0, {}).queue_s == pytest.approx(took_s)
    assert member.view(10.0 + took_s / 2, {}).queue_s == pytest.approx(took_s / 2)
    assert member.view(10.0 + 2 * took_s, {}).queue_s == 0.0


def test_a_backend_computes_what_others_sent_and_what_this_router_sent_one_after_the_other() -> None:
    member = a_member()
    theirs_s = others_wait(member, since=10.0)
    ours_s = member.model.snapshot().work_s(prefill_work(1000))
    member.begin(a_request(prompt_tokens=1000), 1000, now=10.0, is_first_try=True)
    for done in (0.0, 0.25, 0.5):
        at = 10.0 + done * (theirs_s + ours_s)
        assert member.view(at, {}).queue_s == pytest.approx((1.0 - done) * (theirs_s + ours_s))


def test_the_last_first_token_at_a_backend_shows_its_progress_whichever_router_saw_it() -> None:
    member = a_member()
    member.begin(a_request(prompt_tokens=1000), 1000, now=10.0, is_first_try=True)
    theirs_s = others_wait(member, since=20.0)
    ours_s = member.model.snapshot().work_s(prefill_work(1000))
    assert member.view(20.0, {}).queue_s == pytest.approx(theirs_s + ours_s)
    member.elsewhere = member.elsewhere._replace(busy_since=5.0)
    assert member.view(20.0, {}).queue_s == 0.0


def test_a_reported_queue_does_not_shrink_because_time_passes() -> None:
    member = a_member(waiting_tokens=1000, reported_at=10.0)
    took_s = others_wait(member, since=10.0)
    assert member.view(10.0 + took_s, {}).queue_s == member.view(10.0, {}).queue_s > 0.0


@pytest.mark.parametrize("tells", [True, False])
def test_other_routers_requests_at_a_backend_do_not_keep_its_limit_from_being_learnt(tells: bool) -> None:
    member, now, most = a_member(replace(SHARD, reports_cache=False, preempts=False)), 0.0, 0
    member.elsewhere = Elsewhere() if tells else Elsewhere(Traffic(running=20))
    room = under_limit()
    for _ in range(30):
        now += 1.0
        if tells:
            member.backend.reported = Load(running=20, waiting=0, reported_at=now)  # type: ignore[attr-defined]
        sent = []
        while room(a_request(), member.view(now, {})) and len(sent) < 25:
            sent.append(member.begin(a_request(), 1000, now=now, is_first_try=True))
        for flight in sent:
            flight.heard(Delta(text="x"), now + 0.5)
            flight.heard(Delta(finish_reason="stop", usage=Usage(1000, 1)), now + 0.5)
            member.end(flight, None, now=now + 0.5)
        most = max(most, len(sent))
        assert sent, "others keep it full, and it is never found out that there is more room"
        member.check()
    assert most > 20
    assert member.model.snapshot().ttft_s(1000) == pytest.approx(0.5, rel=0.2)


def test_what_it_computes_is_fresh_until_a_part_of_all_caches_was_computed_anew() -> None:
    member = a_member(total_tokens=19_200)
    member.begin(a_request(prompt_tokens=1000), 400, now=10.0, is_first_try=True)
    member.begin(a_request(prompt_tokens=600), 600, now=10.0, is_first_try=True)
    seen = member.view(10.0, {})
    assert (seen.fresh_tokens, seen.cache_tokens) == (1000.0, 19_200)
    assert member.view(1e6, {}).fresh_tokens == 1000.0, "caches keep what they hold while nothing is computed"
    member.turnover.computed(19_200 // 4, cache_tokens=19_200, caches=1)
    assert member.view(10.0, {}).fresh_tokens == pytest.approx(500.0)
    assert a_member().view(0.0, {}).cache_tokens is None


def test_requests_that_ended_since_a_report_do_not_count_against_the_limit() -> None:
    member = a_member(running=0, waiting=0, reported_at=0.0)
    flights = [member.begin(a_request(), 10, now=1.0, is_first_try=True) for _ in range(6)]
    member.backend.reported = Load(running=4, waiting=2, reported_at=2.0)  # type: ignore[attr-defined]
    assert (member.view(2.0, {}).running, member.view(2.0, {}).waiting) == (4, 2)
    for flight in flights[:5]:
        member.end(flight, None, now=3.0)
    view = member.view(3.0, {})
    assert (view.running, view.waiting) == (0, 1)
    assert under_limit()(a_request(), view)
    member.end(flights[5], None, now=3.5)
    assert member.view(4.0, {}).waiting == 0


@pytest.mark.parametrize(
    ("tokens", "alike", "beyond"),
    [(100, 400.0, 600.0), (250, 1000.0, 0.0), (5000, 1000.0, 0.0)],
    ids=["a short prompt", "one like the others", "a long prompt"],
)
def test_of_equal_prompts_in_front_as_much_counts_alike_as_the_prompt_itself_has(
    tokens: float, alike: float, beyond: float
) -> None:
    ahead = _of_equals(Work(1000.0, 8000.0), 4, tokens)
    assert (ahead.alike.tokens, ahead.beyond.tokens) == (alike, beyond)
    assert (ahead.alike.pairs, ahead.beyond.pairs) == (8 * alike, 8 * beyond)


def test_the_times_of_a_request_that_yields_to_others_teach_nothing() -> None:
    server = Serial(a_member())
    for _ in range(30):
        server.ask(1000)
    before = server.member.view(server.now, {}).latency
    server.send(1000)
    for _ in range(30):
        # it is paused while the others' prompts are computed
        flight, at = server.send(1000, rank=BACKGROUND_RANK)
        server.answer(flight, at + 50.0)
    assert server.member.view(server.now, {}).latency == before


def test_what_a_request_that_yields_computes_is_not_fresh() -> None:
    server = Serial(a_member())
    server.send(1000, rank=BACKGROUND_RANK)
    assert server.member.view(server.now, {}).fresh_tokens == 0.0
