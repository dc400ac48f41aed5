"""Comparisons of answers and events, and observations that do not count against a feed."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

import pytest

from policies.nouns import Usage
from policies.prefix.match import Match
from policies.prefix.parity import Doubt, Trust
from router.fleet.parity import ParityMonitor
from router.fleet.prompt_keys import PromptKeys
from shards.kv.keys import block_keys

TOKENS = 640


@dataclass
class Stage:
    """One backend with blocks of 32 tokens, and the blocks in its events."""

    is_whole: bool = False
    now: float = 1000.0
    held: set[int] = field(default_factory=set)
    monitor: ParityMonitor = field(init=False)

    def __post_init__(self) -> None:
        self.monitor = ParityMonitor(
            lambda: self.now,
            holds=lambda _, key: key in self.held,
            is_live=lambda _: True,
            is_whole=lambda _: self.is_whole,
        )
        self.monitor.block_tokens("a", 32)

    def ask(
        self, number: int, *, cached: int | None, reported: bool = False, known: int = 0, prompt_tokens: int = TOKENS
    ) -> None:
        """A prompt is answered: the engine reports `cached` of its tokens as cached. `reported`: events have its
        blocks meanwhile; of `known` blocks they did before. Then events have had all the time they get."""
        ids = struct.pack(f"<{TOKENS}I", *range(number * 1000, number * 1000 + TOKENS))
        keys = block_keys(ids, 7)
        prompt = PromptKeys(keys, "m", token_ids=ids)
        match = Match(known, known, float(known)) if known else None
        expected = self.monitor.expect("a", prompt, keys, match)
        assert expected is not None
        if reported:
            self.held.update(keys)
            self.monitor.stored("a", keys)
        usage = Usage(prompt_tokens, 1, cached or 0)
        self.monitor.answered("a", prompt, expected, usage, counts_cached=cached is not None)
        self.now += 5.0
        self.monitor.tick()
        self.monitor.check()

    def judged(self) -> tuple[Trust, Doubt | None]:
        (report,) = self.monitor.reports_of("a")
        return report.trust, report.doubt


def test_blocks_from_before_the_feed_do_not_count_against_it() -> None:
    stage = Stage()
    for number in range(30):
        stage.ask(number, cached=320)
    assert stage.judged() == (Trust.UNPROVEN, Doubt.UNREPORTED)
    (report,) = stage.monitor.reports_of("a")
    assert "before the router received" in report.reason
    for number in range(30, 42):
        stage.ask(number, cached=0, reported=True)
    assert stage.judged() == (Trust.PROVEN, None)


def test_an_engine_without_cached_counts_may_have_had_any_block_for_long() -> None:
    stage = Stage()
    for number in range(30):
        stage.ask(number, cached=None)
    assert stage.judged() == (Trust.UNPROVEN, Doubt.UNREPORTED)


@pytest.mark.parametrize("cached", [320, None])
def test_an_engine_heard_since_it_was_empty_must_have_reported_every_block(cached: int | None) -> None:
    stage = Stage(is_whole=True)
    for number in range(8):
        stage.ask(number, cached=cached)
    assert stage.judged() == (Trust.BROKEN, Doubt.BLOCKS)


@pytest.mark.parametrize(("cached", "known"), [(0, 0), (128, 2)])
def test_a_prompt_with_no_more_cached_than_events_reported_must_have_been_stored(cached: int, known: int) -> None:
    stage = Stage()
    for number in range(8):
        stage.ask(number, cached=cached, known=known)
    assert stage.judged() == (Trust.BROKEN, Doubt.BLOCKS)


def test_blocks_of_prompts_that_are_counted_otherwise_are_not_waited_for() -> None:
    stage = Stage()
    for number in range(8):
        stage.ask(number, cached=320, prompt_tokens=TOKENS + 7)
    assert stage.judged()[0] is Trust.BROKEN


def test_the_oldest_of_too_many_models_at_backends_is_forgotten() -> None:
    monitor, most = Stage().monitor, 4096
    ids = struct.pack("<64I", *range(64))
    usage = Usage(65, 1, 0)

    def answer(backend: str) -> None:
        monitor.answered(backend, PromptKeys((), "m", token_ids=ids), None, usage, counts_cached=True)

    for _ in range(8):
        answer("first")
    assert monitor.broken("m") == {"first"}
    for number in range(most - 1):
        answer(f"b{number}")
    assert monitor.reports_of("first")
    answer("last")
    monitor.check()
    assert not monitor.reports_of("first")
    assert "first" not in monitor.broken("m")
    assert monitor.reports_of("b0")
    assert monitor.reports_of("last")


def test_a_feed_that_was_broken_comes_back_when_events_and_answers_agree_again() -> None:
    stage = Stage(is_whole=True)
    for number in range(20):
        stage.ask(number, cached=0)
    assert stage.judged() == (Trust.BROKEN, Doubt.BLOCKS)
    for number in range(20, 32):
        stage.ask(number, cached=0, reported=True)
    assert stage.judged() == (Trust.PROVEN, None)
