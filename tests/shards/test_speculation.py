from __future__ import annotations

import random
from collections.abc import Iterable

import numpy as np
import pytest
import torch

from shards.exec.batch import Batch
from shards.kv.keys import BLOCK_TOKENS
from shards.nouns import FinishReason
from tests.shards.copying import CopyingDevice, CopyingNetwork
from tests.shards.driver import Driver, some_tokens

SETTINGS = [
    {},
    {"temperature": 0.7, "seed": 5},
    {"temperature": 1.0, "seed": 5, "top_p": 0.9},
    {"temperature": 0.8, "seed": 6, "top_k": 20, "min_p": 0.02},
    {"logit_bias": {7: 3.0, 9: -50.0}},
    {"top_logprobs": 2},
    {"min_new_tokens": 30, "ignore_eos": False, "logit_bias": {255: 4.0}},
    {"repetition_penalty": 1.3},
    {"presence_penalty": 0.5, "frequency_penalty": 0.2, "temperature": 0.5, "seed": 1},
]


def a_document(tokens: int, seed: int = 0) -> list[int]:
    """Passages that come again and again."""
    rng = random.Random(seed)
    passages = [some_tokens(rng.randint(5, 40), seed=100 * seed + i) for i in range(4)]
    text: list[int] = []
    while len(text) < tokens:
        text += rng.choice(passages)
    return text[:tokens]


KINDS = [CopyingNetwork, CopyingDevice]
"""Networks with tokens that are drawn on the host, and on a device, one step ahead of the host."""


def a_driver(likes: int = 6, kind: type[CopyingNetwork | CopyingDevice] = CopyingNetwork, **options: object) -> Driver:
    return Driver(kind(likes=likes), **options)


def drafts(driver: Driver) -> tuple[int, int]:
    """Tokens that were drafted, and those of them that were drawn."""
    assert driver.load is not None
    return driver.load.drafted_tokens, driver.load.accepted_tokens


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_that_repeats_takes_fewer_steps_and_is_the_same(kind):
    fast, slow = a_driver(likes=8, kind=kind), a_driver(likes=8, kind=kind, speculate="off")
    for driver in (fast, slow):
        driver.ask("a", a_document(300), new=120)
        driver.run()
    assert fast.drawn == slow.drawn
    assert fast.drawn["a", 0] == CopyingNetwork(likes=8).answer(a_document(300), 120)
    assert fast.network.calls < slow.network.calls / 3
    assert max(len(draw.token_ids) for draw in fast.draws) > 8
    assert drafts(slow) == (0, 0)


def test_a_sequence_with_many_wrong_drafts_drafts_less():
    counts = []
    for likes in (4, 7):
        driver = a_driver(likes=likes)
        driver.ask("a", a_document(300), new=200)
        driver.run()
        counts.append(drafts(driver))
    (few, few_right), (many, many_right) = counts
    assert few < many
    assert 0 < few_right < few
    assert 0 < many_right < many


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
def test_every_sampling_setting_draws_what_it_draws_without(sampling, kind):
    fast, slow = a_driver(kind=kind), a_driver(kind=kind, speculate="off")
    for driver in (fast, slow):
        for key in range(3):
            driver.ask(key, a_document(300 + key, seed=key), new=60, **sampling)
        driver.run()
    assert fast.drawn == slow.drawn
    assert fast.ended == slow.ended
    assert [draw.logprobs for draw in slow.draws if draw.key == 0] == [
        (logprobs,) if logprobs else ()
        for draw in fast.draws
        if draw.key == 0
        for logprobs in draw.logprobs or [None] * len(draw.token_ids)
    ]
    looks_back = {"repetition_penalty", "presence_penalty"} & sampling.keys()
    if kind is CopyingNetwork:
        assert (fast.network.calls == slow.network.calls) == bool(looks_back)
    assert (drafts(fast) == (0, 0)) == bool(looks_back)


def test_a_stop_token_within_a_draft_ends_the_answer_there():
    answer = CopyingNetwork(likes=8).answer(a_document(300), 120)
    for place in range(60, 90):
        driver = a_driver(likes=8)
        driver.ask("a", a_document(300), new=120, stop_token_ids=frozenset({answer[place]}))
        driver.run()
        first = answer.index(answer[place])
        assert driver.drawn["a", 0] == answer[: first + 1]
        assert driver.ended["a", 0].reason is FinishReason.STOP
        assert driver.ended["a", 0].output_tokens == first + 1
        driver.assert_nothing_is_held()


def test_a_stop_string_within_a_draft_ends_the_answer_there():
    fast, slow = a_driver(likes=8), a_driver(likes=8, speculate="off")
    text = fast.engine.model.tokenizer.decode(CopyingNetwork(likes=8).answer(a_document(300), 120))
    for driver in (fast, slow):
        for place in range(20, 60):
            driver.ask(place, a_document(300), new=120, stop=(text[3 * place : 3 * place + 5],))
            driver.run()
    assert fast.drawn == slow.drawn
    assert fast.ended == slow.ended
    assert fast.network.calls < slow.network.calls


@pytest.mark.parametrize("new", [1, 2, 3, 50, 51, 52, 53, 54, 55])
def test_max_tokens_end_a_draft(new):
    driver = Driver(_Recording())
    driver.ask("a", a_document(300), new=new)
    driver.run()
    assert driver.drawn["a", 0] == CopyingNetwork(likes=8).answer(a_document(300), new)
    assert driver.ended["a", 0].reason is FinishReason.LENGTH
    # the last token is drawn and not computed, and nothing is computed behind it
    assert max(row.context_tokens for batch in driver.network.batches for row in batch.rows) == 300 + new - 1


def test_choices_of_one_prompt_draft_each_for_itself():
    fast, slow = a_driver(), a_driver(speculate="off")
    for driver in (fast, slow):
        driver.ask("a", a_document(300), new=60, choices=4, temperature=0.8, seed=3)
        driver.run()
    assert fast.drawn == slow.drawn
    assert len({tuple(tokens) for tokens in fast.drawn.values()}) > 1
    assert drafts(fast)[1] > 0


def test_nothing_that_was_drafted_in_vain_is_cached():
    fast, slow = a_driver(likes=5), a_driver(likes=5, speculate="off")
    for driver in (fast, slow):
        driver.ask("a", a_document(200), new=300)
        driver.run()
        # the next turn finds the answer in the cache, and reads its KV
        prompt = a_document(200) + driver.drawn["a", 0] + [1, 2, 3]
        driver.ask("b", prompt, new=20)
        driver.run()
    drafted, accepted = drafts(fast)
    assert accepted < drafted
    assert fast.held == slow.held
    assert fast.drawn == slow.drawn
    assert fast.ended["b", 0].cached_tokens == slow.ended["b", 0].cached_tokens > 400


def test_a_draft_takes_no_block():
    driver = a_driver(likes=8)
    driver.ask("a", a_document(100), new=200)
    crossed = 0
    while driver.engine.has_work:
        driver.step()
        for sequence in driver.engine._roster.running.values():
            assert len(sequence.table) == -(-sequence.computed_tokens // BLOCK_TOKENS)
            crossed += sequence.computed_tokens % BLOCK_TOKENS == 0
    assert crossed > 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(12))
def test_in_a_tight_pool_no_running_sequence_lacks_a_block(seed, kind):
    rng = random.Random(seed)
    driver = a_driver(likes=rng.choice([5, 7, 8]), kind=kind, kv_blocks=rng.choice([10, 14, 24]), max_running=6)
    asked: dict[int, tuple[list[int], int]] = {}
    for key in range(14):
        asked[key] = (a_document(rng.randint(1, 300), seed=rng.randint(0, 3)), rng.randint(1, 150))
        driver.ask(key, asked[key][0], new=asked[key][1])
        for _ in range(rng.randint(0, 12)):
            driver.step()
    driver.run()
    for key, (prompt, new) in asked.items():
        assert driver.drawn[key, 0] == CopyingNetwork(likes=driver.network._likes).answer(prompt, new)
    assert drafts(driver)[1] > 0
    driver.assert_nothing_is_held()


def test_a_sequence_does_not_hurry_if_it_could_take_the_last_block_from_another():
    # 5 and 8 blocks at their peaks, which do not come together unless one hurries
    driver = a_driver(likes=8, kv_blocks=12)
    driver.ask("early", a_document(300), new=20)
    driver.ask("late", a_document(64, seed=1), new=400)
    driver.step()
    while driver.load.running == 2:
        driver.step()
        assert drafts(driver)[0] == 0
    driver.run()
    assert drafts(driver)[1] > 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("host_bytes", [0, 64 * BLOCK_TOKENS * 8])
@pytest.mark.parametrize("seed", range(6))
def test_preempted_cancelled_and_late_answers_are_the_same_as_far_as_they_go(seed, host_bytes, kind):
    rng = random.Random(seed)
    driver = a_driver(likes=7, kind=kind, kv_blocks=16, max_running=3, host_bytes=host_bytes, preempt_cooldown_s=0.0)
    asked: dict[int, tuple[list[int], int]] = {}
    for key in range(12):
        asked[key] = (a_document(rng.randint(10, 200), seed=key), rng.randint(1, 120))
        deadline_s = driver.clock.now_s + rng.uniform(0.01, 2) if rng.random() < 0.2 else None
        driver.ask(key, asked[key][0], new=asked[key][1], rank=rng.randint(0, 2), deadline_s=deadline_s)
        for _ in range(rng.randint(0, 15)):
            driver.clock.now_s += 0.02
            driver.step()
        if rng.random() < 0.2:
            driver.engine.cancel(rng.choice(list(asked)))
    while driver.engine.has_work:
        driver.clock.now_s += 0.02
        driver.step()
    for key, (prompt, new) in asked.items():
        end, drawn = driver.ended[key, 0], driver.drawn[key, 0]
        whole = CopyingNetwork(likes=7).answer(prompt, new)
        assert drawn == (whole if end.reason is FinishReason.LENGTH else whole[: len(drawn)])
        assert end.output_tokens == len(drawn)
    assert drafts(driver)[1] > 0
    driver.assert_nothing_is_held()


class _Poisoned(CopyingNetwork):
    """Not a number from the tenth token of an answer to `prompt_tokens` on."""

    prompt_tokens = 300

    def _logits(self, tokens):
        logits = super()._logits(tokens)
        return np.full_like(logits, np.nan) if len(tokens) >= self.prompt_tokens + 10 else logits


def test_logits_that_are_no_numbers_within_a_draft_fail_what_comes_after_them():
    fast, slow = Driver(_Poisoned(likes=8)), Driver(_Poisoned(likes=8), speculate="off")
    for driver in (fast, slow):
        driver.ask("a", a_document(300), new=50)
        driver.run()
        assert driver.ended["a", 0].reason is FinishReason.FAILED
        driver.assert_nothing_is_held()
    assert fast.drawn == slow.drawn
    assert len(fast.drawn["a", 0]) == 10
    assert fast.network.calls < slow.network.calls


class _Recording(CopyingNetwork):
    def __init__(self, *, likes: int = 8) -> None:
        super().__init__(likes=likes)
        self.batches: list[Batch] = []

    def forward(self, batch: Batch) -> torch.Tensor:
        self.batches.append(batch)
        return super().forward(batch)


@pytest.mark.parametrize("options", [{"deterministic": True}, {"speculate": "off"}])
def test_deterministic_engines_and_configured_ones_compute_one_token_at_a_time(options):
    driver = Driver(_Recording(), **options)
    driver.ask("a", a_document(300), new=40)
    driver.run()
    assert all(len(batch.logit_rows) <= 1 for batch in driver.network.batches)
    assert drafts(driver) == (0, 0)


@pytest.mark.parametrize("run_ahead", ["on", "off"])
def test_a_device_gets_drafts_and_runs_ahead_where_there_are_none(run_ahead):
    driver = a_driver(likes=8, kind=CopyingDevice, run_ahead=run_ahead)
    driver.ask("a", a_document(300), new=120)
    driver.run()
    assert driver.drawn["a", 0] == driver.network.answer(a_document(300), 120)
    assert drafts(driver)[1] > 60
    assert driver.network.most_due == (2 if run_ahead == "on" else 1)


def test_a_device_is_not_made_to_wait_for_drafts_that_gain_less_than_the_wait():
    ticking = a_driver(likes=8, kind=CopyingDevice)
    ticking.ask("a", a_document(300), new=120)
    while ticking.engine.has_work:
        # as if the host took an hour beside each step
        ticking.engine._scheduler.overhead_s = 3600.0
        ticking.step()
    assert ticking.drawn["a", 0] == ticking.network.answer(a_document(300), 120)
    assert drafts(ticking) == (0, 0)


def test_the_host_work_beside_a_step_is_measured_without_the_wait_for_the_device():
    driver = a_driver(kind=CopyingDevice, speculate="off")
    submit, collect = driver.network.submit, driver.network.collect

    def slow_submit(*arguments):
        driver.clock.now_s += 0.004
        return submit(*arguments)

    def slow_collect(ticket):
        driver.clock.now_s += 0.1
        return collect(ticket)

    driver.network.submit, driver.network.collect = slow_submit, slow_collect
    driver.ask("a", some_tokens(10), new=100)
    driver.run()
    assert driver.engine._scheduler.overhead_s == pytest.approx(0.004, rel=0.01)


def test_an_unknown_way_to_speculate_is_refused():
    with pytest.raises(ValueError, match="speculate is always; it must be auto or off"):
        a_driver(speculate="always")


def test_many_rows_draft_less_than_one():
    def share(rows: int) -> float:
        driver = a_driver(likes=7, kv_blocks=64 * 6, max_running=64)
        for key in range(rows):
            driver.ask(key, a_document(300, seed=key), new=50)
        while driver.engine.has_work:
            driver.step(check=False)
        return drafts(driver)[0] / rows

    assert share(60) < share(1) / 2


def test_nothing_is_guessed_beside_a_prompt():
    driver = Driver(_Recording(), chunk_tokens=64)
    driver.ask("a", a_document(300), new=100)
    while len(driver.drawn["a", 0]) < 20:
        driver.step()
    driver.network.batches.clear()
    driver.ask("b", some_tokens(600, seed=9), new=1)
    while ("b", 0) not in driver.ended:
        driver.step()
    assert len(driver.network.batches) >= 10
    assert all(min(row.tokens for row in batch.rows) == 1 for batch in driver.network.batches)
    driver.run()
    assert driver.drawn["a", 0] == CopyingNetwork(likes=8).answer(a_document(300), 100)


def _tokens(batches: Iterable[Batch]) -> list[int]:
    return [len(batch.token_ids) for batch in batches]


def test_a_step_that_has_no_time_left_verifies_nothing():
    driver = Driver(_Recording(), step_s=1e-9)
    driver.ask("a", a_document(300), new=40)
    driver.run()
    # the prompt comes first, in five steps; what is certain does not ask for time
    assert _tokens(driver.network.batches)[5:] == [1] * 39
