"""Steps that are planned before the one before them is collected, on a device that computes as late as it may."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from shards.exec.batch import Batch
from shards.exec.drawing import Drawing, Sample
from shards.exec.fake import FakeNetwork
from shards.exec.fake_device import FakeDevice
from shards.kv.keys import BLOCK_TOKENS, block_keys, root_key
from shards.nouns import Cause, FinishReason
from tests.shards.driver import Driver, a_tokenizer, packed, some_tokens
from tests.shards.test_scheduler import a_scheduler, enter

HOST = BLOCK_TOKENS * 8 * 200
"""Bytes of host memory for 200 blocks of the fake network."""


def ahead(network: FakeDevice | None = None, **options: object) -> Driver:
    return Driver(network or FakeDevice(), **options)


def steps(driver: Driver, count: int) -> None:
    for _ in range(count):
        driver.step()


def test_a_step_is_submitted_before_the_one_before_it_is_collected_and_tokens_come_a_step_later():
    driver, prompt = ahead(), some_tokens(100)
    driver.ask("a", prompt, new=3)
    drawn = []
    for _ in range(4):
        driver.step()
        drawn.append(len(driver.drawn["a", 0]))
    assert drawn == [0, 1, 2, 3]
    assert driver.network.most_due == 2
    assert driver.drawn["a", 0] == driver.network.answer(prompt, 3)
    driver.run()
    driver.assert_nothing_is_held()


def test_switched_off_every_step_is_waited_for_and_the_tokens_are_the_same():
    driver, prompt = ahead(run_ahead="off"), some_tokens(100)
    driver.ask("a", prompt, new=3)
    driver.step()
    assert len(driver.drawn["a", 0]) == 1
    driver.run()
    assert driver.network.most_due == 1
    assert driver.drawn["a", 0] == driver.network.answer(prompt, 3)


def test_a_length_is_known_beforehand_and_nothing_is_computed_in_vain():
    driver = ahead()
    driver.ask("a", some_tokens(100), new=30)
    driver.run()
    assert sum(driver.network.computed) == 100 + 29


@pytest.mark.parametrize("kind", ["token", "string"])
def test_a_stop_costs_one_token_that_is_not_sent(kind):
    prompt = some_tokens(20)
    answer = FakeNetwork().answer(prompt, 8)
    stop = "".join(a_tokenizer().id_to_token(token) for token in answer[3:5])
    more = {"stop": (stop,)} if kind == "string" else {"stop_token_ids": frozenset({answer[4]})}
    seen, computed = [], []
    for run_ahead in ("off", "on"):
        driver = ahead(run_ahead=run_ahead)
        driver.ask("a", prompt, new=30, **more)
        driver.run()
        seen.append((driver.drawn["a", 0], driver.ended["a", 0], driver.held))
        computed.append(sum(driver.network.computed))
        driver.assert_nothing_is_held()
    assert seen[0] == seen[1]
    assert seen[0][0] == answer[:5]
    assert computed[1] == computed[0] + 1


@pytest.mark.parametrize("prompt_tokens", [62, 63, 64])
def test_a_block_with_a_token_behind_the_end_is_never_cached(prompt_tokens):
    prompt = some_tokens(prompt_tokens)
    answer = FakeNetwork().answer(prompt, 2)
    assert answer[0] != answer[1]
    driver = ahead()
    driver.ask("a", prompt, new=30, stop_token_ids=frozenset({answer[1]}))
    driver.run()
    # the stop token itself has KV by then, in the block that it fills
    assert sum(driver.network.computed) == prompt_tokens + 2
    assert driver.held == set(block_keys(packed([*prompt, answer[0]]), root_key("m", "")))


def test_answers_are_cached_up_to_their_last_token_as_in_an_engine_that_waits():
    for new in (27, 28, 29, 30, 92, 93):
        held = []
        for run_ahead in ("off", "on"):
            driver = ahead(run_ahead=run_ahead)
            driver.ask("a", some_tokens(100), new=new)
            driver.run()
            held.append(driver.held)
        assert held[0] == held[1]


def test_one_document_for_many_is_prefilled_once():
    driver, document = ahead(chunk_tokens=64), some_tokens(320)
    for key in range(6):
        driver.ask(key, [*document, key], new=1)
    driver.run()
    assert sum(driver.network.computed) == 320 + 6


def test_rows_with_penalties_bias_and_logprobs_run_ahead_as_all_others_and_change_no_other_answer():
    prompts = {key: some_tokens(50 + 7 * key, key) for key in range(4)}
    warm = {"temperature": 1.0, "top_p": 0.9, "top_k": 40, "seed": 5}
    kinds: dict[int, dict[str, Any]] = {
        0: warm,
        1: {**warm, "repetition_penalty": 1.3, "frequency_penalty": 0.2},
        2: {"top_logprobs": 2, "logit_bias": {3: 1.0}},
        3: {"min_new_tokens": 5, "stop_token_ids": frozenset(range(0, 250, 3))},
    }
    together, alone = ahead(), {}
    for key, prompt in prompts.items():
        # the first one runs ahead before the others come and after they have gone
        together.ask(key, prompt, new=80 - 20 * key, **kinds[key])
        steps(together, 5)
        by_host = Driver()
        by_host.ask(key, prompt, new=80 - 20 * key, **kinds[key])
        by_host.run()
        alone[key, 0] = by_host.drawn[key, 0]
    together.network.most_due = 0
    steps(together, 5)
    assert together.network.most_due == 2
    together.run()
    assert together.drawn == alone
    assert [len(draw.logprobs) for draw in together.draws if draw.key == 2] == [1] * 40


@pytest.mark.parametrize("at", [1, 2, 3, 10])
@pytest.mark.parametrize("end", ["cancel", "deadline"])
def test_what_ends_while_its_step_is_on_the_way_is_charged_for_what_was_shown(at, end):
    driver = ahead()
    driver.ask("a", some_tokens(63), new=100, deadline_s=9.0)
    driver.ask("b", some_tokens(30, 1), new=20)
    steps(driver, at)
    if end == "cancel":
        driver.engine.cancel("a")
    else:
        driver.clock.now_s = 9.0
    driver.run()
    assert driver.ended["a", 0].output_tokens == len(driver.drawn["a", 0]) == at - 1
    assert driver.drawn["b", 0] == driver.network.answer(some_tokens(30, 1), 20)
    driver.assert_nothing_is_held()


@pytest.mark.parametrize("host_bytes", [0, HOST], ids=["recomputed", "parked"])
@pytest.mark.parametrize("new", [21, 22, 40])
def test_a_token_that_comes_after_its_sequence_was_preempted_counts_even_if_it_is_the_last(host_bytes, new):
    driver = ahead(max_running=1, host_bytes=host_bytes)
    low, high = some_tokens(150), some_tokens(100, 1)
    driver.ask("low", low, new=new, rank=1)
    steps(driver, 21)
    assert len(driver.drawn["low", 0]) == 20
    driver.ask("high", high, new=10)
    driver.run()
    assert driver.drawn["low", 0] == driver.network.answer(low, new)
    assert driver.drawn["high", 0] == driver.network.answer(high, 10)
    driver.assert_nothing_is_held()


class Faulty(FakeDevice):
    """Fails on token 251: when it is `asked` to compute it, when it has to give what it drew, or with NaN."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault
        self._faults: set[object] = set()

    def submit(self, batch: Batch, drawings: Sequence[Drawing]) -> int:
        if 251 in batch.token_ids and self.fault == "submit":
            raise RuntimeError("out of memory")
        ticket = super().submit(batch, drawings)
        if 251 in batch.token_ids:
            self._faults.add(ticket)
        return ticket

    def collect(self, ticket: Any) -> list[Sample | None]:
        tokens = super().collect(ticket)
        if ticket in self._faults and self.fault == "collect":
            raise RuntimeError("out of memory")
        return [None] * len(tokens) if ticket in self._faults and self.fault == "nan" else tokens


@pytest.mark.parametrize("fault", ["submit", "collect", "nan"])
def test_a_step_that_fails_costs_its_own_batch_and_caches_nothing_of_it(fault):
    driver, good = ahead(Faulty(fault)), some_tokens(100, 1)
    driver.ask("early", good, new=30)
    steps(driver, 3)
    driver.engine.pace("early", paused=True)
    driver.ask("bad", [*some_tokens(100), 251], new=30)
    driver.run()
    driver.ask("late", good, new=30)
    driver.run()
    assert driver.ended["bad", 0].reason is FinishReason.FAILED
    assert driver.ended["bad", 0].output_tokens == 0
    assert driver.ended["early", 0].reason is FinishReason.FAILED
    assert driver.drawn["late", 0] == driver.network.answer(good, 30)
    assert not driver.held & set(block_keys(packed(some_tokens(100)), root_key("m", "")))
    driver.assert_nothing_is_held()


def test_a_sequence_with_a_drawn_but_unseen_token_waits_for_no_first_token():
    driver = ahead()
    driver.ask("a", some_tokens(20), new=3)
    assert driver.engine.step().predictions == {}


def test_more_prompt_before_the_first_token_was_seen_rejects_the_request():
    driver = ahead()
    driver.ask("a", some_tokens(20), new=50)
    driver.step()
    driver.engine.extend("a", packed([1]))
    driver.run()
    assert (driver.ended["a", 0].reason, driver.ended["a", 0].cause) == (FinishReason.REJECTED, Cause.INVALID)
    driver.assert_nothing_is_held()


@pytest.mark.parametrize(
    ("network", "options", "hint"),
    [
        (FakeNetwork(), {"run_ahead": "on"}, "drawn on the host"),
        (FakeDevice(), {"run_ahead": "on", "deterministic": True}, "one step after the other"),
        (FakeDevice(), {"run_ahead": "always"}, "it must be auto, on or off"),
        (FakeDevice(), {"max_running": 65}, "at most 64 tokens a step"),
    ],
)
def test_what_cannot_run_ahead_is_refused(network, options, hint):
    with pytest.raises(ValueError, match=hint):
        Driver(network, **options)


def test_a_deterministic_engine_waits_for_each_step():
    driver = ahead(deterministic=True)
    driver.ask("a", some_tokens(300), new=20, temperature=1.0, seed=3)
    driver.step()
    assert len(driver.drawn["a", 0]) == 1
    driver.run()
    assert driver.network.most_due == 0


@pytest.mark.parametrize("seed", range(12))
def test_blocks_are_there_although_ends_are_seen_a_step_late(seed):
    """All ranks are equal, so sequences are preempted only for lack of a block."""
    rng = random.Random(seed)
    scheduler = a_scheduler(blocks=rng.choice([8, 12]), batch_tokens=rng.choice([1, 16384]), max_running=16)
    due, everybody = [], []
    for _ in range(400):
        if rng.random() < 0.2 and len(everybody) < 60:
            tokens, new = rng.randint(1, 300), rng.randint(1, 110)
            everybody.append(enter(scheduler, len(everybody), tokens, new=new, lag=1))
        step = scheduler.next_step(0.0)
        for piece in step.pieces:
            scheduler.advance(piece)
            scheduler.store(piece.sequence)
        for piece in due:
            if piece.draws and piece.sequence.arrival in scheduler.roster.running:
                scheduler.take(piece.sequence, 1)
                if len(piece.sequence.output) == piece.sequence.request.submission.max_new_tokens:
                    scheduler.finish(piece.sequence)
                else:
                    scheduler.store(piece.sequence)
        due = step.pieces
        assert not any(sequence.request.preemptions for sequence in everybody)
        scheduler.check()
    assert len(everybody) > 20


@dataclass
class Asked:
    prompt: list[int]
    new: int
    domain: str
    more: dict[str, Any] = field(default_factory=dict)

    def alone(self) -> Driver:
        """The answer of an engine that waits and draws on the host, with no other request."""
        driver = Driver()
        driver.ask("it", self.prompt, new=self.new, **self.more)
        while driver.engine.has_work:
            driver.step(check=False)
        return driver


def a_request(rng: random.Random, key: int) -> Asked:
    trunk = some_tokens(128, rng.randint(0, 2))[: rng.choice([0, 64, 128])]
    prompt = (trunk + some_tokens(rng.randint(1, 200), key))[:300]
    more: dict[str, Any] = {}
    if rng.random() < 0.6:
        more |= {"temperature": rng.choice([0.7, 1.5]), "seed": rng.getrandbits(64), "top_p": rng.choice([0.9, 1.0])}
    if rng.random() < 0.5:
        more["stop_token_ids"] = frozenset(rng.sample(range(250), 12))
    if rng.random() < 0.3:
        more["stop"] = tuple(rng.sample("ABCDEFGHIJ", 2))
    if rng.random() < 0.3:
        more |= rng.choice(
            [
                {"repetition_penalty": 1.2},
                {"presence_penalty": 0.6, "frequency_penalty": -0.2},
                {"top_logprobs": 1},
                {"min_new_tokens": 1},
                {"logit_bias": {7: 2.0}},
            ]
        )
    return Asked(prompt, rng.randint(1, 40), rng.choice("ab"), more)


@pytest.mark.parametrize("seed", range(9))
def test_in_a_random_life_every_sequence_answers_as_it_would_alone(seed):
    rng = random.Random(seed)
    driver = ahead(
        kv_blocks=rng.choice([10, 30]),
        host_bytes=(0, HOST // 20, HOST)[seed % 3],
        max_running=rng.choice([1, 3, 6]),
        lanes=rng.choice([1, 4]),
        chunk_tokens=rng.choice([64, 8192]),
        batch_tokens=rng.choice([1, 16384]),
        ageing_s=3.0,
        preempt_cooldown_s=rng.choice([0.0, 2.0]),
        max_waiting=1000,
    )
    asked: dict[int, Asked] = {}
    stored: set[int] = set()

    def step() -> None:
        if driver.copiers:
            driver.copiers[0].lag = rng.choice([0, 0, 3])
        driver.step(check=rng.random() < 0.3)
        stored.update(driver.held)

    for _ in range(200):
        driver.clock.now_s += rng.choice([0.0, 0.01, 0.5])
        roll, known = rng.random(), list(asked)
        if roll < 0.09 or not known:
            key = len(asked)
            request = asked[key] = a_request(rng, key)
            late = {"deadline_s": driver.clock.now_s + 20.0} if rng.random() < 0.1 else {}
            driver.open(
                key,
                len(request.prompt),
                request.new,
                rank=rng.randint(0, 3),
                domain=request.domain,
                **request.more,
                **late,
            )
            cut = rng.randint(0, len(request.prompt))
            driver.engine.extend(key, packed(request.prompt[:cut]))
            driver.engine.extend(key, packed(request.prompt[cut:]))
        elif roll < 0.13:
            driver.engine.cancel(rng.choice(known))
        elif roll < 0.17:
            driver.engine.pace(rng.choice(known), paused=rng.random() < 0.3, rank=rng.randint(0, 3))
        elif roll < 0.18:
            driver.engine.clear_cache()
        elif roll < 0.2:
            driver.engine.pin(rng.choice("pq"), driver.held, domain=rng.choice("ab"), for_s=3.0)
        else:
            step()
    for key in asked:
        driver.engine.pace(key, paused=False)
    for _ in range(20_000):
        if len(driver.ended) == len(asked):
            break
        driver.sleep()
        driver.clock.now_s += 0.1
        step()
    allowed: set[int] = set()
    for key, request in asked.items():
        finished, answer, alone = driver.ended[key, 0], driver.drawn[key, 0], request.alone()
        whole = alone.drawn["it", 0]
        assert finished.output_tokens == len(answer)
        # the last token of an answer that ended by itself is never computed; of one that was cut off it may have been
        computed = answer[:-1]
        if finished.reason in (FinishReason.CANCELLED, FinishReason.DEADLINE):
            assert answer == whole[: len(answer)]
            computed = answer
        else:
            assert (answer, finished.reason, finished.stop) == (whole, *reason_of(alone))
        allowed |= set(block_keys(packed(request.prompt + computed), root_key("m", request.domain)))
    assert stored <= allowed
    assert driver.network.most_due == 2
    driver.step()
    driver.run()
    assert "0 owned" in repr(driver.engine)
    assert " 0 held" in repr(driver.engine)


def reason_of(alone: Driver) -> tuple[FinishReason, str]:
    finished = alone.ended["it", 0]
    return finished.reason, finished.stop
