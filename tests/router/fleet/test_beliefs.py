"""Beliefs: from events, from answers, or from prompts just sent there; the best of them counts."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Any

import pytest

from backends.fake import FakeBackend
from policies.nouns import Delta, Usage
from router.fleet.beliefs import Beliefs
from router.fleet.cluster.cluster import Cluster
from router.fleet.cluster.flights import Flight
from router.fleet.prompt_keys import PromptKeys
from router.shared.replicas.news import Belief, Learnt
from shards.kv.keys import block_keys
from tests.policies.builders import a_backend, a_request

KEYS = tuple(range(1, 11))
OTHERS = tuple(range(101, 111))
TOKENS = 64 * len(KEYS)
COLD_S = a_backend().latency.ttft_s(TOKENS)


@dataclass
class Stage:
    """Beliefs of one backend, and flights to it on a clock that the test moves."""

    tells: bool = False
    candidates: tuple[str, ...] = ()
    now: float = 1000.0
    beliefs: Beliefs = field(init=False)
    cluster: Cluster = field(init=False)

    def __post_init__(self) -> None:
        self.beliefs = Beliefs(lambda _: self.tells, lambda: self.now, lambda name: name in self.candidates)
        self.cluster = Cluster([FakeBackend("a")], clock=lambda: self.now)

    def answer(
        self, ttft_s: float = COLD_S, usage: Usage | None = None, *, keys: tuple[int, ...] = KEYS, exact: bool = True
    ) -> Flight:
        """A prompt with `keys` goes to `a` and is answered after so many seconds."""
        flight = self.cluster.begin("a", a_request(prompt_tokens=TOKENS), TOKENS)
        prompt = PromptKeys(keys, is_exact=exact)
        self.beliefs.sent("a", prompt)
        self.now += ttft_s
        flight.heard(Delta(text="x"), self.now)
        flight.heard(Delta(finish_reason="stop", usage=usage), self.now)
        self.cluster.end(flight)
        self.beliefs.ended(prompt, flight, a_backend("a"))
        return flight

    def ask(
        self,
        keys: tuple[int, ...],
        ids: bytes,
        *,
        reported: tuple[int, ...],
        usage: Usage | None = None,
        evicted: tuple[int, ...] = (),
    ) -> None:
        """A prompt of `ids` is answered, while events report the blocks `reported` as stored and `evicted` as gone."""
        prompt = PromptKeys(keys, token_ids=ids)
        self.beliefs.longest(prompt)
        flight = self.cluster.begin("a", a_request(prompt_tokens=len(ids) // 4), len(ids) // 4)
        self.beliefs.sent("a", prompt)
        self.beliefs.evicted("a", evicted)
        self.beliefs.stored("a", reported)
        flight.heard(Delta(text="x"), self.now)
        flight.heard(Delta(finish_reason="stop", usage=usage), self.now)
        self.cluster.end(flight)
        self.beliefs.ended(prompt, flight, a_backend("a"))

    def expected(self, keys: Any = KEYS) -> float:
        match = self.beliefs.longest(PromptKeys(keys)).get("a")
        return match.expected_blocks if match else 0.0


def test_what_was_just_sent_somewhere_is_believed_there_for_a_moment() -> None:
    stage = Stage(tells=True)
    stage.beliefs.sent("a", PromptKeys(KEYS))
    assert stage.expected() > 8
    assert stage.expected((99, 98)) == 0
    stage.now += 20
    assert stage.expected() == 0


def test_what_failed_is_forgotten_at_once() -> None:
    stage = Stage(tells=True)
    stage.beliefs.sent("a", PromptKeys(KEYS))
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


def test_an_answer_in_one_piece_teaches_nothing_about_cached_tokens() -> None:
    stage = Stage()
    stage.answer()
    flight = stage.cluster.begin("a", a_request(prompt_tokens=TOKENS), TOKENS)
    flight.heard(Delta(text="all of it", is_whole=True), stage.now)
    stage.cluster.end(flight)
    stage.beliefs.ended(PromptKeys(KEYS), flight, a_backend("a"))
    assert stage.expected() > 8


@pytest.mark.parametrize("key_tokens", [16.0, 64.0, 640.0])
def test_of_text_a_key_counts_as_many_tokens_as_its_prompt_has(key_tokens: float) -> None:
    shared: list[Belief] = []
    stage = Stage()
    prompt, tokens = PromptKeys(KEYS * 10, is_exact=False, key_tokens=key_tokens), round(100 * key_tokens)
    stage.beliefs.share(shared.append)
    for ttft_s in (a_backend().latency.ttft_s(tokens), a_backend().latency.ttft_s(1, tokens)):
        flight = stage.cluster.begin("a", a_request(prompt_tokens=tokens), tokens)
        stage.now += ttft_s
        flight.heard(Delta(text="x"), stage.now)
        flight.heard(Delta(finish_reason="stop", usage=Usage(tokens, 1280)), stage.now)
        stage.cluster.end(flight)
        stage.beliefs.ended(prompt, flight, a_backend("a"))
    learnt = [belief for belief in shared if isinstance(belief, Learnt)]
    assert [belief.drawn_blocks for belief in learnt] == [1280 // key_tokens] * 2
    # the time of a short prompt is too small to measure
    assert [belief.cached_share for belief in learnt] == [None, 1.0 if tokens >= 6400 else None]


def test_a_backend_with_cache_reports_teaches_nothing() -> None:
    stage = Stage(tells=True)
    stage.answer()
    stage.now += 60
    assert stage.expected() == 0


def feed(stage: Stage, backend: str = "a") -> None:
    """Let the backend have a live feed, with blocks of 16 tokens."""
    stage.beliefs.emptied(stage.beliefs.joined(backend, 0), is_empty=True)
    stage.beliefs.parity.block_tokens(backend, 16)
    stage.beliefs.trust(backend, 0, 1.0, is_whole=True)


def prove(stage: Stage, answers: int = 4) -> None:
    """Let events tell of the blocks of so many prompts, as the router computes them."""
    for number in range(answers):
        ids = struct.pack("<128I", *range(number * 1000, number * 1000 + 128))
        keys = block_keys(ids, 7)
        stage.ask(keys, ids, reported=keys)


def test_a_proven_feed_counts_more_than_learnt_blocks_and_a_broken_one_less() -> None:
    stage = Stage()
    feed(stage)
    stage.answer()
    stage.now += 60
    # unknown yet whether its events are about the same blocks
    assert stage.expected() > 8
    prove(stage)
    assert stage.expected() == 0
    stage.beliefs.trust("a", 0, 0.4)
    assert stage.expected() > 8


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_a_prompt_that_is_sent_to_a_second_backend_is_compared_at_each(order: str) -> None:
    stage = Stage()
    stage.cluster = Cluster([FakeBackend("a"), FakeBackend("b")], clock=lambda: stage.now)
    for name in "ab":
        feed(stage, name)
    ids = struct.pack("<128I", *range(128))
    prompt = PromptKeys(block_keys(ids, 7), token_ids=ids)
    stage.beliefs.longest(prompt)
    flights = {name: stage.cluster.begin(name, a_request(prompt_tokens=128), 128) for name in "ab"}
    for name in "ab":
        stage.beliefs.sent(name, prompt)
    stage.beliefs.check()
    for name in order:
        flight = flights[name]
        flight.heard(Delta(text="x"), stage.now)
        flight.heard(Delta(finish_reason="stop", usage=Usage(128, 1)), stage.now)
        stage.cluster.end(flight)
        stage.beliefs.ended(prompt, flight, a_backend(name))
        stage.beliefs.check()
        stage.beliefs.stored(name, prompt.keys)
    stage.now += 5.0
    stage.beliefs.parity.tick()
    stage.beliefs.check()
    assert {name: len(stage.beliefs.parity.reports_of(name)) for name in "ab"} == {"a": 1, "b": 1}
    assert not prompt.expected


def test_keys_of_text_are_learnt_and_believed_beside_a_feed_that_is_proven() -> None:
    stage = Stage()
    feed(stage)
    prove(stage)
    stage.answer(exact=False)
    stage.now += 60
    assert stage.beliefs.longest(PromptKeys(KEYS, is_exact=False))["a"].expected_blocks > 8


def test_a_wrong_tokenizer_is_found_out_and_what_was_learnt_counts_until_events_agree_again() -> None:
    stage = Stage()
    feed(stage)
    prove(stage, 20)
    ids = struct.pack("<640I", *range(640))
    ours, theirs = block_keys(ids, 7), block_keys(ids, 8)
    for _ in range(8):
        stage.ask(ours, ids, reported=theirs, usage=Usage(700, 1, 0))
    assert stage.beliefs.parity.broken("") == {"a"}
    (report,) = stage.beliefs.parity.reports_of("a")
    assert "chat template" in report.reason
    stage.now += 60
    # no event tells of these keys: without a feed it would be known all the same
    assert stage.beliefs.longest(PromptKeys(ours))["a"].expected_blocks > 8
    assert "a" not in stage.beliefs.longest(PromptKeys(theirs))
    prove(stage, 20)
    assert stage.beliefs.parity.proven("") == {"a"}
    assert stage.beliefs.longest(PromptKeys(theirs))["a"].expected_blocks == 10
    stage.beliefs.check()


def test_late_or_missed_events_do_not_count_against_the_tokenizer() -> None:
    stage = Stage()
    feed(stage)
    late: list[tuple[int, ...]] = []
    for number in range(30):
        ids = struct.pack("<128I", *range(number * 1000, number * 1000 + 128))
        keys = block_keys(ids, 7)
        stage.ask(keys, ids, reported=())
        late.append(keys)
        if number % 2:
            stage.beliefs.trust("a", 0, 0.5)
            stage.now += 10
        else:
            stage.now += 1
            stage.beliefs.stored("a", keys)
        stage.beliefs.parity.tick()
        stage.beliefs.trust("a", 0, 1.0)
    assert stage.beliefs.parity.proven("") == {"a"}
    stage.beliefs.check()


def test_blocks_that_never_come_although_counts_agree_are_noticed_after_a_moment() -> None:
    stage = Stage()
    feed(stage)
    for number in range(8):
        ids = struct.pack("<128I", *range(number * 1000, number * 1000 + 128))
        stage.ask(block_keys(ids, 7), ids, reported=block_keys(ids, 8), usage=Usage(128, 1, 0))
    assert not stage.beliefs.parity.broken("")
    stage.now += 5
    stage.beliefs.parity.tick()
    assert stage.beliefs.parity.broken("") == {"a"}


def test_hits_that_an_engine_denies_again_and_again_break_its_feed_but_not_what_was_evicted_meanwhile() -> None:
    stage = Stage()
    feed(stage)
    prove(stage)
    ids = struct.pack("<640I", *range(640))
    keys = block_keys(ids, 7)
    stage.ask(keys, ids, reported=keys, usage=Usage(640, 1, 0))
    stage.ask(keys, ids, reported=(), usage=Usage(640, 1, 576))
    for _ in range(12):
        stage.beliefs.stored("a", keys)
        stage.ask(keys, ids, reported=(), usage=Usage(640, 1, 0), evicted=keys)
    assert not stage.beliefs.parity.broken("")
    stage.beliefs.stored("a", keys)
    for _ in range(8):
        stage.ask(keys, ids, reported=(), usage=Usage(640, 1, 0))
    assert stage.beliefs.parity.broken("") == {"a"}


def test_an_engine_that_restarted_holds_nothing_of_what_was_learnt() -> None:
    stage = Stage()
    feed(stage)
    stage.answer()
    assert stage.expected() > 8
    stage.beliefs.emptied("a", is_empty=False)
    assert stage.expected() > 8
    stage.beliefs.emptied("a", is_empty=True)
    assert stage.expected() == 0


def test_answers_teach_about_a_backend_with_one_unheard_rank_whichever_rank_reported_last() -> None:
    stage = Stage()
    feed(stage)
    prove(stage)
    stage.answer()
    stage.now += 60
    for confidences in ((1.0, 0.0), (0.0, 1.0)):
        for rank, confidence in enumerate(confidences):
            stage.beliefs.trust("a", rank, confidence)
        assert stage.expected() > 8
    stage.beliefs.trust("a", 0, 1.0)
    assert stage.expected() == 0


def test_ranks_that_can_be_chosen_are_believed_each_by_itself() -> None:
    stage = Stage(candidates=("a", "a/1"))
    stage.beliefs.index.store(stage.beliefs.joined("a", 1), KEYS)
    stage.beliefs.index.store(stage.beliefs.joined("a", 0), KEYS[:3])
    found = stage.beliefs.longest(PromptKeys(KEYS))
    assert {name: (match.blocks, match.p_hit) for name, match in found.items()} == {"a": (3, 1.0), "a/1": (10, 1.0)}
    stage.candidates = ("a",)
    assert {name: match.p_hit for name, match in stage.beliefs.longest(PromptKeys(KEYS)).items()} == {"a": 0.5}
    stage.beliefs.forget("a")
    assert not stage.beliefs.longest(PromptKeys(KEYS))


def test_a_rank_that_is_not_heard_teaches_by_its_answers_and_the_others_do_not() -> None:
    stage = Stage(candidates=("a", "a/1"))
    feed(stage)
    prove(stage)
    stage.answer()
    stage.now += 60
    stage.beliefs.trust("a", 0, 0.0)
    stage.beliefs.trust("a", 1, 1.0)
    assert stage.expected() > 8
    stage.beliefs.trust("a", 0, 1.0)
    assert stage.expected() == 0
    stage.beliefs.trust("a", 1, 0.0)
    assert stage.expected() == 0, "whether the other rank is heard says nothing of this one"


def test_a_backend_below_a_path_is_believed_under_its_own_name() -> None:
    stage = Stage()
    name = "gpu@there:8000/engine/3"
    stage.beliefs.trust(name, 1, 1.0)
    stage.beliefs.trust(name, 0, 1.0)
    stage.beliefs.index.store(stage.beliefs.joined(name, 1), KEYS)
    stage.beliefs.index.store("shard@there:1/2", KEYS)
    found = stage.beliefs.longest(PromptKeys(KEYS))
    assert {backend: match.p_hit for backend, match in found.items()} == {name: 0.5, "shard@there:1/2": 1.0}
    stage.beliefs.forget(name)
    assert stage.beliefs.longest(PromptKeys(KEYS)).keys() == {"shard@there:1/2"}


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
    stage.beliefs.ended(PromptKeys(KEYS), flight, a_backend("a"))
    stage.now += 60
    assert stage.expected() == 0


def test_a_backend_that_is_gone_is_forgotten_in_every_way() -> None:
    stage = Stage()
    stage.answer()
    stage.beliefs.index.store(stage.beliefs.joined("a", 1), KEYS)
    stage.beliefs.forget("a")
    assert stage.expected() == pytest.approx(0.0)
    stage.beliefs.check()
