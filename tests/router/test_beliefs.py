"""Beliefs: told by events, learnt from answers, or just sent there; the best of them counts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from backends.fake import FakeBackend
from policies.nouns import Delta, Usage
from router.beliefs import Beliefs
from router.cluster.cluster import Cluster
from router.cluster.flights import Flight
from tests.policies.builders import a_backend, a_request

KEYS = tuple(range(1, 11))
OTHERS = tuple(range(101, 111))
TOKENS = 64 * len(KEYS)
COLD_S = a_backend().latency.ttft_s(TOKENS)


@dataclass
class Stage:
    """Beliefs of one backend, and flights to it on a clock that the test moves."""

    tells: bool = False
    now: float = 1000.0
    beliefs: Beliefs = field(init=False)
    cluster: Cluster = field(init=False)

    def __post_init__(self) -> None:
        self.beliefs = Beliefs(lambda _: self.tells, lambda: self.now)
        self.cluster = Cluster([FakeBackend("a")], clock=lambda: self.now)

    def answer(self, ttft_s: float = COLD_S, usage: Usage | None = None, *, keys: tuple[int, ...] = KEYS) -> Flight:
        """A prompt with `keys` goes to `a` and is answered after so many seconds."""
        flight = self.cluster.begin("a", a_request(prompt_tokens=TOKENS), TOKENS)
        self.beliefs.sent("a", keys)
        self.now += ttft_s
        flight.heard(Delta(text="x"), self.now)
        flight.heard(Delta(finish_reason="stop", usage=usage), self.now)
        self.cluster.end(flight)
        self.beliefs.answered("a", keys, flight, a_backend("a"))
        return flight

    def expected(self, keys: Any = KEYS) -> float:
        match = self.beliefs.longest(keys).get("a")
        return match.expected_blocks if match else 0.0


def test_what_was_just_sent_somewhere_is_believed_there_for_a_moment() -> None:
    stage = Stage(tells=True)
    stage.beliefs.sent("a", KEYS)
    assert stage.expected() > 8
    assert stage.expected((99, 98)) == 0
    stage.now += 20
    assert stage.expected() == 0


def test_what_failed_is_forgotten_at_once() -> None:
    stage = Stage(tells=True)
    stage.beliefs.sent("a", KEYS)
    stage.beliefs.failed("a")
    assert stage.expected() == 0


def test_events_outlast_the_moment() -> None:
    stage = Stage(tells=True)
    stage.beliefs.index.store("a", KEYS[:6])
    stage.now += 3600
    assert stage.expected() == 6


def test_a_backend_without_events_is_believed_to_keep_what_it_answered() -> None:
    stage = Stage()
    stage.answer()
    stage.now += 60
    assert stage.expected() > 8
    stage.now += 24 * 3600
    assert stage.expected() < 1


def test_an_answer_in_one_piece_says_nothing_of_what_was_cached() -> None:
    stage = Stage()
    stage.answer()
    flight = stage.cluster.begin("a", a_request(prompt_tokens=TOKENS), TOKENS)
    flight.heard(Delta(text="all of it", is_whole=True), stage.now)
    stage.cluster.end(flight)
    stage.beliefs.answered("a", KEYS, flight, a_backend("a"))
    assert stage.expected() > 8


def test_where_events_tell_nothing_is_learnt() -> None:
    stage = Stage(tells=True)
    stage.answer()
    stage.now += 60
    assert stage.expected() == 0


def test_a_live_feed_says_more_than_what_was_learnt_and_a_broken_one_less() -> None:
    stage = Stage()
    stage.answer()
    stage.now += 60
    stage.beliefs.index.clear(stage.beliefs.joined("a", 0))
    stage.beliefs.trust("a", 0, 1.0)
    assert stage.expected() == 0
    stage.beliefs.trust("a", 0, 0.4)
    assert stage.expected() > 8


def test_a_backend_of_which_one_rank_is_not_heard_teaches_by_its_answers_whichever_rank_is_told_of_last() -> None:
    stage = Stage()
    stage.answer()
    stage.now += 60
    for confidences in ((1.0, 0.0), (0.0, 1.0)):
        for rank, confidence in enumerate(confidences):
            stage.beliefs.trust("a", rank, confidence)
        assert stage.expected() > 8
    stage.beliefs.trust("a", 0, 1.0)
    assert stage.expected() == 0


def test_a_backend_below_a_path_is_believed_under_its_own_name() -> None:
    stage = Stage()
    name = "gpu@there:8000/engine/3"
    stage.beliefs.trust(name, 1, 1.0)
    stage.beliefs.trust(name, 0, 1.0)
    stage.beliefs.index.store(stage.beliefs.joined(name, 1), KEYS)
    stage.beliefs.index.store("shard@there:1/2", KEYS)
    found = stage.beliefs.longest(KEYS)
    assert {one: match.p_hit for one, match in found.items()} == {name: 0.5, "shard@there:1/2": 1.0}
    stage.beliefs.forget(name)
    assert stage.beliefs.longest(KEYS).keys() == {"shard@there:1/2"}


def test_two_hits_in_a_row_that_a_counting_server_denies_mean_that_it_has_started_again() -> None:
    stage = Stage()
    for _ in range(2):
        stage.answer(usage=Usage(TOKENS, 1, TOKENS - 64))
        stage.answer(usage=Usage(TOKENS, 1, TOKENS - 64), keys=OTHERS)
    stage.now += 30
    assert stage.expected(OTHERS) > 8
    for _ in range(2):
        stage.answer(usage=Usage(TOKENS, 1, 0))
    stage.now += 30
    assert stage.expected(OTHERS) == 0


def test_zeros_of_a_server_that_never_counts_are_not_taken_for_misses() -> None:
    stage = Stage()
    for _ in range(6):
        stage.answer(usage=Usage(TOKENS, 1, 0))
        stage.now += 30
    assert stage.expected() > 8


def test_an_answer_that_never_came_teaches_nothing() -> None:
    stage = Stage()
    flight = stage.cluster.begin("a", a_request(prompt_tokens=TOKENS), TOKENS)
    stage.cluster.end(flight)
    stage.beliefs.answered("a", KEYS, flight, a_backend("a"))
    stage.now += 60
    assert stage.expected() == 0


def test_a_backend_that_is_gone_is_forgotten_in_every_way() -> None:
    stage = Stage()
    stage.answer()
    stage.beliefs.index.store(stage.beliefs.joined("a", 1), KEYS)
    stage.beliefs.forget("a")
    assert stage.expected() == pytest.approx(0.0)
    stage.beliefs.check()
