from __future__ import annotations

import random

import pytest

from shards.exec.fake import FakeNetwork
from shards.kv.keys import BLOCK_TOKENS
from shards.kv.options import PoolOptions
from shards.nouns import FinishReason
from tests.shards.driver import Driver, packed, some_tokens

HOST = BLOCK_TOKENS * 8 * 200
"""Bytes of host memory for 200 blocks of the fake network."""

either_way = pytest.mark.parametrize("host_bytes", [0, HOST], ids=["recomputed", "parked"])


def steps(driver: Driver, count: int) -> None:
    for _ in range(count):
        driver.step()


@either_way
def test_a_better_rank_takes_the_only_slot_and_the_other_goes_on_as_if_nothing_had_been(host_bytes):
    driver = Driver(max_running=1, host_bytes=host_bytes)
    low, high = some_tokens(150), some_tokens(100, 1)
    driver.ask("low", low, new=40, rank=1)
    steps(driver, 21)
    driver.ask("high", high, new=10, rank=0)
    driver.run()
    assert [key for key, _ in driver.ended] == ["high", "low"]
    assert driver.drawn["low", 0] == driver.network.answer(low, 40)
    assert driver.drawn["high", 0] == driver.network.answer(high, 10)
    driver.assert_nothing_is_held()


def test_what_was_parked_is_not_computed_again_and_what_was_dropped_is_found_in_the_cache():
    computed = []
    for host_bytes in (HOST, 0):
        driver = Driver(max_running=1, host_bytes=host_bytes)
        driver.ask("low", some_tokens(150), new=40, rank=1)
        steps(driver, 21)
        driver.ask("high", some_tokens(100, 1), new=10, rank=0)
        driver.run()
        computed.append(sum(driver.network.computed))
    assert computed[0] == 150 + 39 + 100 + 9
    # 170 tokens had KV, two of their blocks were full and survived; the last drawn one had none
    assert computed[1] - computed[0] == 170 - 2 * BLOCK_TOKENS


@either_way
def test_a_better_rank_takes_the_blocks_that_it_lacks(host_bytes):
    driver = Driver(kv_blocks=10, host_bytes=host_bytes)
    prompts = {key: some_tokens(200, key) for key in range(2)}
    for key, prompt in prompts.items():
        driver.ask(key, prompt, new=100, rank=2)
    steps(driver, 10)
    large = some_tokens(300, 9)
    driver.ask("large", large, new=30, rank=1)
    driver.run()
    # the younger one made room, the older one stayed
    assert [key for key, _ in driver.ended] == ["large", 0, 1]
    assert driver.drawn["large", 0] == driver.network.answer(large, 30)
    for key, prompt in prompts.items():
        assert driver.drawn[key, 0] == driver.network.answer(prompt, 100)
    driver.assert_nothing_is_held()


@either_way
@pytest.mark.parametrize("at", [1, 3, 12, 30])
def test_sampler_penalties_and_stop_strings_outlive_a_preemption(host_bytes, at):
    answers = []
    for is_disturbed in (False, True):
        driver = Driver(max_running=1, host_bytes=host_bytes, chunk_tokens=64, step_s=1e-9)
        sampling = {"temperature": 1.0, "top_p": 0.9, "seed": 5, "repetition_penalty": 1.3, "frequency_penalty": 0.2}
        driver.ask("low", some_tokens(150), new=60, rank=1, stop=("BCD", "XY"), top_logprobs=2, **sampling)
        steps(driver, at)
        if is_disturbed:
            driver.ask("high", some_tokens(100, 1), new=10)
        driver.run()
        answers.append([draw for draw in driver.draws if draw.key == "low"])
    assert answers[0] == answers[1]


@pytest.mark.parametrize("asked", range(4))
def test_a_sequence_that_waits_for_a_copy_goes_on_when_it_lands(asked):
    driver = Driver(kv_blocks=4, host_bytes=HOST)
    document = some_tokens(129)
    driver.ask("first", document)
    driver.run()
    driver.ask("flood", some_tokens(250, 1))
    driver.run()
    # it says that a copy has landed when it was asked so often, which may be in the middle of a step
    driver.copiers[0].lag, driver.copiers[0].asked = asked, 0
    driver.ask("again", document)
    driver.run()
    assert driver.drawn["again", 0] == driver.drawn["first", 0]
    assert driver.ended["again", 0].cached_tokens == 128


def test_sequences_give_way_neither_to_an_equal_rank_nor_if_they_are_not_preemptible():
    driver = Driver(max_running=1)
    driver.ask("first", some_tokens(20), new=10, rank=1, preemptible=False)
    driver.step()
    driver.ask("equal", some_tokens(20, 1), rank=1)
    driver.ask("better", some_tokens(20, 2), rank=0)
    driver.run()
    assert [key for key, _ in driver.ended] == ["first", "better", "equal"]


def test_ageing_improves_the_place_in_the_queue_and_protects_it_but_preempts_no_sequence():
    driver = Driver(max_running=1, ageing_s=10.0)
    driver.ask("running", some_tokens(20), new=10, rank=1)
    driver.step()
    driver.ask("old", some_tokens(20, 1), rank=2)
    driver.clock.now_s = 25.0
    driver.ask("young", some_tokens(20, 2), rank=1)
    driver.run()
    assert [key for key, _ in driver.ended] == ["running", "old", "young"]


def test_a_place_that_waiting_has_earned_is_spared_for_a_while_and_then_the_given_rank_counts():
    driver = Driver(max_running=1, ageing_s=10.0, preempt_cooldown_s=5.0)
    driver.ask("running", some_tokens(20), new=2)
    driver.step()
    driver.ask("batch", some_tokens(20, 1), new=400, rank=2)
    driver.clock.now_s = 25.0
    steps(driver, 6)
    assert driver.drawn["batch", 0]
    driver.ask("chat", some_tokens(20, 2), new=2, rank=1)
    steps(driver, 4)
    assert not driver.drawn["chat", 0]
    assert driver.engine.next_deadline_s == 30.0
    driver.clock.now_s = 30.0
    driver.run()
    assert [key for key, _ in driver.ended] == ["running", "chat", "batch"]
    assert driver.drawn["batch", 0] == driver.network.answer(some_tokens(20, 1), 400)


def test_a_sequence_that_did_not_wait_is_not_spared():
    driver = Driver(max_running=1, preempt_cooldown_s=5.0)
    driver.ask("batch", some_tokens(20), new=400, rank=2)
    steps(driver, 2)
    driver.ask("chat", some_tokens(20, 2), new=2, rank=1)
    steps(driver, 2)
    assert ("chat", 0) in driver.ended


def test_a_resumed_sequence_is_not_preempted_for_a_while():
    driver = Driver(max_running=1, preempt_cooldown_s=5.0)
    driver.ask("low", some_tokens(20), new=100, rank=1)
    driver.step()
    driver.ask("first", some_tokens(20, 1), new=2)
    steps(driver, 4)
    driver.ask("second", some_tokens(20, 2), new=2)
    steps(driver, 4)
    assert ("second", 0) not in driver.ended
    assert driver.engine.next_deadline_s == 5.0
    driver.clock.now_s = 5.0
    steps(driver, 3)
    assert ("second", 0) in driver.ended
    assert ("low", 0) not in driver.ended


def test_a_request_that_stands_still_gives_way_when_its_time_of_grace_is_over():
    driver = Driver(max_running=1, preempt_cooldown_s=5.0)
    driver.open("low", 200, rank=1)
    driver.engine.extend("low", packed(some_tokens(10)))
    driver.step()
    for key in "ab":
        driver.ask(key, some_tokens(20, 1), new=2)
        driver.run()
    assert ("b", 0) not in driver.ended
    driver.clock.now_s = 5.0
    assert driver.engine.has_work
    driver.run()
    assert ("b", 0) in driver.ended


def test_a_request_is_preempted_only_so_often():
    driver = Driver(max_running=1, preempt_cooldown_s=0.0, most_preemptions=2)
    driver.ask("low", some_tokens(20), new=100, rank=1)
    for key in range(3):
        steps(driver, 9)
        driver.ask(key, some_tokens(20, 1 + key), new=5)
    driver.run()
    assert [key for key, _ in driver.ended] == [0, 1, "low", 2]
    assert driver.drawn["low", 0] == driver.network.answer(some_tokens(20), 100)


@either_way
@pytest.mark.parametrize("end", ["cancel", "deadline"])
def test_what_is_preempted_can_end_while_it_waits(host_bytes, end):
    driver = Driver(max_running=1, host_bytes=host_bytes)
    driver.ask("low", some_tokens(150), new=40, rank=1, deadline_s=9.0)
    steps(driver, 10)
    driver.ask("high", some_tokens(100, 1), new=10)
    driver.step()
    if end == "cancel":
        driver.engine.cancel("low")
    else:
        driver.clock.now_s = 9.0
    driver.run()
    assert driver.ended["low", 0].reason is (FinishReason.CANCELLED if end == "cancel" else FinishReason.DEADLINE)
    assert driver.ended["low", 0].output_tokens == 10
    driver.assert_nothing_is_held()


@either_way
def test_a_cleared_cache_does_not_disturb_preempted_sequences(host_bytes):
    driver = Driver(max_running=1, host_bytes=host_bytes)
    driver.ask("low", some_tokens(150), new=40, rank=1)
    steps(driver, 10)
    driver.ask("high", some_tokens(100, 1), new=10)
    driver.step()
    driver.engine.clear_cache()
    driver.run()
    assert driver.drawn["low", 0] == driver.network.answer(some_tokens(150), 40)
    driver.assert_nothing_is_held()


def test_a_low_rank_is_not_starved_by_an_endless_stream_of_better_ones():
    driver = Driver(max_running=1, ageing_s=1.0, most_preemptions=2)
    driver.ask("low", some_tokens(20), new=20, rank=3)
    for key in range(400):
        driver.ask(key, some_tokens(30, key), new=2)
        driver.clock.now_s += 0.1
        driver.step()
        if ("low", 0) in driver.ended:
            return
    pytest.fail("the low rank starves")


def test_predictions_come_ten_times_a_second_for_sequences_that_have_not_drawn():
    driver = Driver(max_running=1)
    driver.ask("running", some_tokens(20), new=100)
    driver.step()
    driver.ask("waiting", some_tokens(200, 1))
    driver.clock.now_s = 0.05
    assert driver.engine.step().predictions == {}
    driver.clock.now_s = 0.1
    predictions = driver.engine.step().predictions
    assert set(predictions) == {"waiting"}
    assert predictions["waiting"] > 0


def test_a_copy_on_its_way_makes_no_prediction_a_lifetime():
    driver = Driver(max_running=1, host_bytes=HOST)
    driver.ask("low", some_tokens(150), new=40, rank=1)
    steps(driver, 21)
    driver.ask("high", some_tokens(100, 1), new=10, rank=0)
    steps(driver, 5)
    driver.copiers[0].lag = 1000
    while ("high", 0) not in driver.ended:
        driver.step()
    for key in range(3):
        driver.ask(key, some_tokens(64, key), rank=1)
    driver.clock.now_s += 1
    predictions = driver.engine.step().predictions
    assert set(predictions) == {0, 1, 2}
    assert max(predictions.values()) < 60


class TimedNetwork(FakeNetwork):
    """Takes 1 ms a step and 0.1 ms a token, on the driver's clock."""

    driver: Driver

    def forward(self, batch):
        self.driver.clock.now_s += 1e-3 + 1e-4 * len(batch.token_ids)
        return super().forward(batch)


@pytest.mark.parametrize("seed", range(5))
def test_a_short_prompt_waits_for_one_step_only_whatever_long_ones_there_are(seed):
    rng, network = random.Random(seed), TimedNetwork(context_tokens=20_000)
    driver = network.driver = Driver(network, kv_blocks=2000, step_s=0.05, max_running=64)
    for key in range(20):
        driver.ask(key, some_tokens(100, key), new=2)
    driver.run()
    for key in range(100, 106):
        driver.ask(key, some_tokens(10_000, key), new=5)
    for _ in range(rng.randint(1, 30)):
        driver.step()
    for key in range(200, 205):
        asked_s, prompt = driver.clock.now_s, some_tokens(rng.randint(1, 200), key)
        driver.ask(key, prompt, new=1)
        driver.step()
        assert (key, 0) in driver.ended
        alone_s = 1e-3 + 1e-4 * len(prompt)
        assert driver.clock.now_s - asked_s <= alone_s + 0.05 * 1.1
        driver.step()


@pytest.mark.parametrize("seed", range(16))
def test_every_sequence_finishes_right_in_a_random_life(seed):
    """About 10,000 operations over all seeds."""
    rng = random.Random(seed)
    small = seed % 4 == 0
    options = {
        "kv_blocks": 3 if small else rng.choice([10, 30]),
        "host_bytes": (0, HOST // 20, HOST)[seed // 4 % 3],
        "max_running": rng.choice([1, 3, 6]),
        "lanes": rng.choice([1, 4]),
        "chunk_tokens": rng.choice([64, 8192]),
        "batch_tokens": rng.choice([1, 16384]),
        "step_s": rng.choice([1e-9, 0.05]),
        "ageing_s": 3.0,
        "preempt_cooldown_s": rng.choice([0.0, 2.0]),
        "max_waiting": 1000,
        "deterministic": seed % 3 == 0,
        "window_tokens": 1024,
    }
    if options["kv_blocks"] >= 10 and rng.random() < 0.5:
        options["pool"] = PoolOptions(pin_share=0.2, floors={"a": 2})
    driver = Driver(**options)
    for copier in driver.copiers:
        copier.lag = rng.choice([0, 0, 5])
    most_prompt, most_new = (140, 50) if small else (300, 40)
    prompts: dict[int, list[int]] = {}
    for _ in range(630):
        driver.clock.now_s += rng.choice([0.0, 0.01, 0.5])
        roll, known = rng.random(), list(prompts)
        if roll < 0.07 or not known:
            key = len(prompts)
            trunk = some_tokens(128, rng.randint(0, 2))[: rng.choice([0, 64, 128])]
            prompts[key] = (trunk + some_tokens(rng.randint(1, 200), key))[:most_prompt]
            new, preemptible = rng.randint(1, most_new), rng.random() < 0.9
            more = {"rank": rng.randint(0, 3), "preemptible": preemptible, "domain": rng.choice("ab")}
            driver.open(key, len(prompts[key]), new, **more)
            cut = rng.randint(0, len(prompts[key]))
            driver.engine.extend(key, packed(prompts[key][:cut]))
            driver.engine.extend(key, packed(prompts[key][cut:]))
        elif roll < 0.15:
            driver.engine.cancel(rng.choice(known))
        elif roll < 0.2:
            driver.engine.pace(rng.choice(known), paused=rng.random() < 0.3, rank=rng.randint(0, 3))
        elif roll < 0.21:
            driver.engine.clear_cache()
        elif roll < 0.25:
            driver.engine.pin(rng.choice("pq"), driver.held, domain=rng.choice("ab"), for_s=3.0)
        else:
            driver.step(check=rng.random() < 0.3)
    for key in prompts:
        driver.engine.pace(key, paused=False)
    for _ in range(20_000):
        if len(driver.ended) == len(prompts):
            break
        driver.sleep()
        driver.clock.now_s += 0.1
        driver.step(check=False)
    assert {key for key, _ in driver.ended} == set(prompts), driver.engine
    for (key, choice), finished in driver.ended.items():
        answer = driver.drawn[key, choice]
        assert answer == driver.network.answer(prompts[key], len(answer))
        assert finished.reason in (FinishReason.LENGTH, FinishReason.CANCELLED), finished.message
    driver.step()
    assert "0 owned" in repr(driver.engine)
    assert " 0 held" in repr(driver.engine)
