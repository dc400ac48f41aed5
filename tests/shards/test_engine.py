from __future__ import annotations

import random
from collections.abc import Hashable

import pytest
import torch

from shards.exec.batch import Batch
from shards.exec.fake import FakeHostMemory, FakeNetwork
from shards.exec.fake_device import FakeDevice
from shards.exec.network import DeviceLost
from shards.kv.keys import BLOCK_TOKENS, block_keys, root_key
from shards.kv.options import PoolOptions
from shards.nouns import Cause, FinishReason, Pinned
from shards.shortage import NotEnoughMemory
from tests.shards.driver import EOS, Driver, a_tokenizer, packed, some_tokens


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 128, 129, 1000])
def test_an_answer_is_what_the_network_alone_would_give(length):
    driver, prompt = Driver(), some_tokens(length)
    driver.ask("a", prompt, new=70)
    driver.run()
    assert driver.drawn["a", 0] == driver.network.answer(prompt, 70)
    assert driver.ended["a", 0].reason is FinishReason.LENGTH
    assert driver.ended["a", 0].output_tokens == 70
    driver.assert_nothing_is_held()


def test_many_requests_at_once_do_not_disturb_each_other():
    driver = Driver(max_running=5, kv_blocks=40)
    prompts = {key: some_tokens(random.Random(key).choice([5, 64, 200, 700]), key) for key in range(25)}
    for key, prompt in prompts.items():
        driver.ask(key, prompt, new=key + 1)
    driver.run()
    for key, prompt in prompts.items():
        assert driver.drawn[key, 0] == driver.network.answer(prompt, key + 1)
    driver.assert_nothing_is_held()


@pytest.mark.parametrize("length", [64, 128, 200, 1000])
def test_a_hit_equals_a_miss_and_computes_only_what_is_new(length):
    driver, prompt = Driver(), some_tokens(length)
    driver.ask("cold", prompt)
    driver.run()
    before = sum(driver.network.computed)
    driver.ask("warm", prompt)
    driver.run()
    cached = (length - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    assert driver.drawn["warm", 0] == driver.drawn["cold", 0]
    assert driver.ended["warm", 0].cached_tokens == cached
    assert sum(driver.network.computed) - before == length - cached + 4


def test_a_conversation_finds_its_own_answer_in_the_cache():
    driver, prompt = Driver(), some_tokens(100)
    driver.ask("first", prompt, new=100)
    driver.run()
    second = [*prompt, *driver.drawn["first", 0], *some_tokens(50, 9)]
    driver.ask("second", second)
    driver.run()
    # the last token drawn was never computed, so 199 of the 200 have KV
    assert driver.ended["second", 0].cached_tokens == 192
    assert driver.drawn["second", 0] == driver.network.answer(second, 5)


def test_another_domain_shares_nothing():
    driver, prompt = Driver(), some_tokens(300)
    driver.ask("a", prompt, domain="a")
    driver.run()
    driver.ask("b", prompt, domain="b")
    driver.run()
    assert driver.ended["b", 0].cached_tokens == 0
    assert driver.drawn["b", 0] == driver.drawn["a", 0]
    assert len(driver.held) == 8


def test_cache_events_carry_the_keys_that_a_router_computes():
    driver, prompt = Driver(), some_tokens(200)
    driver.ask("a", prompt, domain="acme")
    driver.run()
    assert driver.held == set(block_keys(packed(prompt), root_key("m", "acme")))


@pytest.mark.parametrize("seed", range(25))
def test_any_arrival_and_any_chunking_give_the_same_answers(seed):
    rng = random.Random(seed)
    driver = Driver(
        kv_blocks=rng.choice([24, 64]),
        lanes=rng.choice([1, 8]),
        max_running=rng.choice([1, 3, 16]),
        chunk_tokens=rng.choice([64, 8192]),
        batch_tokens=rng.choice([64, 16384]),
    )
    document = some_tokens(400, seed)
    prompts = {key: document[: rng.randint(1, 400)] + some_tokens(rng.randint(0, 200), key) for key in range(10)}
    left = {key: packed(prompt) for key, prompt in prompts.items()}
    for key, prompt in prompts.items():
        slice_tokens = rng.choice([None, 1, 100])
        driver.open(key, len(prompt), 3, rank=rng.randint(0, 2), prefill_slice=slice_tokens)
    while left:
        key = rng.choice(list(left))
        cut = 4 * rng.choice([1, 10, 64, 100, 600])
        driver.engine.extend(key, left[key][:cut])
        left[key] = left[key][cut:]
        if not left[key]:
            del left[key]
        if rng.random() < 0.7:
            driver.step()
    driver.run()
    for key, prompt in prompts.items():
        assert driver.drawn[key, 0] == driver.network.answer(prompt, 3)
        assert driver.progress[key][-1] == (len(prompt), driver.ended[key, 0].cached_tokens)
    driver.assert_nothing_is_held()


def test_a_burst_on_one_document_computes_it_once():
    driver, document = Driver(kv_blocks=200), some_tokens(640)
    prompts = {key: document + some_tokens(10, key) for key in range(12)}
    for key, prompt in prompts.items():
        driver.ask(key, prompt, new=1)
    driver.run()
    assert sum(driver.network.computed) == 640 + 12 * 10
    assert [driver.ended[key, 0].cached_tokens for key in prompts] == [0, *[640] * 11]
    for key, prompt in prompts.items():
        assert driver.drawn[key, 0] == driver.network.answer(prompt, 1)


def test_a_prompt_that_arrives_in_crumbs_still_finds_what_is_cached():
    driver, prompt = Driver(), some_tokens(300)
    driver.ask("a", prompt)
    driver.run()
    driver.open("b", 300)
    for start in range(0, 300, 10):
        driver.engine.extend("b", packed(prompt[start : start + 10]))
        driver.step()
    driver.run()
    assert driver.ended["b", 0].cached_tokens == 256
    assert driver.drawn["b", 0] == driver.drawn["a", 0]


def test_a_follower_of_a_cancelled_leader_goes_on_alone():
    driver, prompt = Driver(chunk_tokens=64, step_s=1e-6), some_tokens(640)
    driver.ask("leader", prompt)
    driver.ask("follower", prompt)
    for _ in range(4):
        driver.step()
    driver.engine.cancel("leader")
    driver.run()
    assert driver.drawn["follower", 0] == driver.network.answer(prompt, 5)
    assert driver.ended["follower", 0].cached_tokens >= 3 * BLOCK_TOKENS


def test_choices_share_the_prompt_and_have_their_own_seeds():
    driver, prompt = Driver(), some_tokens(200)
    driver.ask("a", prompt, new=20, choices=4, temperature=1.5, seed=7)
    driver.run()
    answers = [driver.drawn["a", choice] for choice in range(4)]
    assert len({tuple(answer) for answer in answers}) == 4
    assert sum(driver.network.computed) == 192 + 4 * (8 + 19)
    driver.ask("b", prompt, new=20, temperature=1.5, seed=9)
    driver.run()
    assert driver.drawn["b", 0] == answers[2]


def test_more_choices_than_slots_take_turns():
    driver = Driver(max_running=2, kv_blocks=4)
    driver.ask("a", some_tokens(70), choices=7)
    driver.run()
    assert len(driver.ended) == 7
    assert len({tuple(answer) for answer in driver.drawn.values()}) == 1


def test_a_seed_gives_the_same_answer_in_any_company():
    prompt, answers = some_tokens(90), []
    for others in (0, 5):
        driver = Driver()
        for other in range(others):
            driver.ask(other, some_tokens(150, other + 1), new=30, temperature=1.0)
        driver.ask("a", prompt, new=30, temperature=1.0, top_p=0.95, seed=11)
        driver.run()
        answers.append(driver.drawn["a", 0])
    assert answers[0] == answers[1]


def test_without_a_seed_the_engine_gives_one():
    driver = Driver()
    for key in "ab":
        driver.ask(key, some_tokens(10), new=20, temperature=2.0)
    driver.run()
    assert driver.drawn["a", 0] != driver.drawn["b", 0]


def test_end_of_sequence_stops_unless_it_is_ignored():
    driver, prompt = Driver(), some_tokens(20)
    driver.ask("a", prompt, logit_bias={EOS: 100.0}, ignore_eos=False)
    driver.ask("b", prompt, logit_bias={EOS: 100.0}, new=3)
    driver.ask("c", prompt, logit_bias={EOS: 100.0}, ignore_eos=False, min_new_tokens=2)
    driver.run()
    assert (driver.drawn["a", 0], driver.ended["a", 0].reason) == ([EOS], FinishReason.STOP)
    assert (driver.drawn["b", 0], driver.ended["b", 0].reason) == ([EOS] * 3, FinishReason.LENGTH)
    assert len(driver.drawn["c", 0]) == 3
    assert driver.drawn["c", 0][-1] == EOS


def test_stop_token_ids_stop():
    driver, prompt = Driver(), some_tokens(20)
    answer = driver.network.answer(prompt, 30)
    driver.ask("a", prompt, new=30, stop_token_ids=frozenset({answer[4]}))
    driver.run()
    assert driver.drawn["a", 0] == answer[: answer.index(answer[4]) + 1]
    assert driver.ended["a", 0].reason is FinishReason.STOP
    assert driver.ended["a", 0].stop == ""


def test_a_stop_string_across_tokens_stops_and_is_named():
    driver, prompt = Driver(), some_tokens(20)
    answer = driver.network.answer(prompt, 8)
    stop = "".join(a_tokenizer().id_to_token(token) for token in answer[4:7])
    driver.ask("a", prompt, new=30, stop=("nonsense", stop[1:]))
    driver.run()
    assert driver.drawn["a", 0] == answer[:7]
    assert (driver.ended["a", 0].reason, driver.ended["a", 0].stop) == (FinishReason.STOP, stop[1:])


def test_logprobs_come_with_each_token():
    driver = Driver()
    driver.ask("a", some_tokens(20), top_logprobs=2)
    driver.ask("b", some_tokens(20, 1))
    driver.run()
    asked = [drawn for drawn in driver.draws if drawn.key == "a"]
    assert all(len(drawn.logprobs) == 1 for drawn in asked)
    assert all(drawn.logprobs[0].top[0] == (drawn.token_ids[0], drawn.logprobs[0].logprob) for drawn in asked)
    assert all(not drawn.logprobs for drawn in driver.draws if drawn.key == "b")


def test_a_request_ends_when_its_deadline_has_passed_whatever_it_does():
    driver = Driver(max_running=2)
    driver.ask("decoding", some_tokens(20), new=500, deadline_s=5.0)
    driver.open("half", 1000, deadline_s=5.0)
    driver.engine.extend("half", packed(some_tokens(100)))
    driver.step()
    driver.ask("waiting", some_tokens(20), deadline_s=5.0)
    driver.step()
    assert driver.engine.next_deadline_s == 5.0
    driver.clock.now_s = 5.0
    driver.step()
    assert {finished.reason for finished in driver.ended.values()} == {FinishReason.DEADLINE}
    assert len(driver.ended) == 3
    driver.assert_nothing_is_held()


def test_a_stalled_engine_has_no_work_until_a_deadline_passes():
    driver = Driver()
    driver.open("half", 1000, deadline_s=5.0)
    driver.engine.extend("half", packed(some_tokens(100)))
    driver.run()
    assert not driver.engine.has_work
    driver.clock.now_s = 6.0
    assert driver.engine.has_work
    driver.run()
    assert driver.ended["half", 0].reason is FinishReason.DEADLINE


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 8, 12])
def test_cancelling_at_any_stage_frees_everything(steps):
    driver = Driver(chunk_tokens=64, step_s=1e-6, max_running=3)
    for key in range(5):
        driver.ask(key, some_tokens(200, key), new=30, choices=2)
    driver.open("half", 500)
    driver.engine.extend("half", packed(some_tokens(100)))
    for _ in range(steps):
        driver.step()
    for key in [*range(5), "half", "unknown"]:
        driver.engine.cancel(key)
    driver.engine.check()
    driver.run()
    assert len(driver.ended) == 11
    assert {finished.reason for finished in driver.ended.values()} == {FinishReason.CANCELLED}
    driver.assert_nothing_is_held()


def test_what_comes_for_a_cancelled_request_is_ignored():
    driver = Driver()
    driver.open("a", 100)
    driver.engine.cancel("a")
    driver.engine.extend("a", packed([1, 2, 3]))
    driver.engine.pace("a", rank=3)
    driver.run()
    assert driver.ended["a", 0].reason is FinishReason.CANCELLED


def test_a_paused_prompt_waits_and_goes_on():
    driver, prompt = Driver(), some_tokens(300)
    driver.open("a", 300)
    driver.engine.pace("a", paused=True)
    driver.engine.extend("a", packed(prompt))
    driver.run()
    assert driver.network.calls == 0
    driver.engine.pace("a", paused=False, prefill_slice=64)
    driver.run()
    assert driver.drawn["a", 0] == driver.network.answer(prompt, 5)
    assert driver.network.computed[:5] == [64, 64, 64, 64, 44]


def test_a_better_rank_is_admitted_first():
    driver = Driver(max_running=1)
    driver.ask("low", some_tokens(20), rank=2)
    driver.ask("lower", some_tokens(20, 1), rank=3)
    driver.ask("high", some_tokens(20, 2), rank=0)
    driver.engine.pace("lower", rank=1)
    driver.run()
    assert [key for key, _ in driver.ended] == ["high", "lower", "low"]


def test_a_request_that_does_not_fit_now_waits_and_a_small_one_passes():
    driver = Driver(kv_blocks=10)
    driver.ask("running", some_tokens(300), new=200)
    driver.step()
    driver.ask("large", some_tokens(300, 1), new=200)
    driver.ask("small", some_tokens(20, 2))
    driver.run()
    assert [key for key, _ in driver.ended] == ["small", "running", "large"]


def test_a_stream_of_small_requests_does_not_starve_a_large_one():
    driver = Driver(kv_blocks=10, max_waiting=4)
    for key in range(3):
        driver.ask(key, some_tokens(150, key), new=4 + 3 * key)
    driver.step()
    driver.ask("large", some_tokens(500), new=100)
    for key in range(3, 600):
        if driver.drawn["large", 0]:
            return
        driver.ask(key, some_tokens(150, key), new=10)
        driver.step()
    pytest.fail("the large one still waits")


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"prompt_tokens": 0}, Cause.INVALID),
        ({"new": 0}, Cause.INVALID),
        ({"prompt_tokens": 4096}, Cause.CONTEXT),
        ({"prompt_tokens": 4000, "new": 96}, Cause.CONTEXT),
        ({"choices": 0}, Cause.INVALID),
        ({"temperature": -1.0}, Cause.INVALID),
        ({"logit_bias": {256: 1.0}}, Cause.INVALID),
    ],
)
def test_what_can_never_be_served_is_rejected_at_once(changes, cause):
    driver = Driver(kv_blocks=60)
    driver.open("a", **{"prompt_tokens": 10, **changes})
    driver.engine.extend("a", packed([1] * 10))
    driver.run()
    finished = driver.ended["a", 0]
    assert (finished.reason, finished.cause) == (FinishReason.REJECTED, cause)
    assert finished.message
    assert driver.network.calls == 0


def test_a_rejected_request_answers_for_each_choice():
    driver = Driver()
    driver.open("a", 0, choices=3)
    driver.run()
    assert len(driver.ended) == 3


def test_too_many_waiting_are_rejected_as_overload():
    driver = Driver(max_waiting=2)
    for key in range(3):
        driver.open(key, 10)
    driver.run()
    assert driver.ended[2, 0].cause is Cause.OVERLOADED


def test_a_key_used_twice_ends_the_request():
    driver = Driver()
    driver.open("a", 10)
    driver.open("a", 10)
    driver.run()
    assert driver.ended["a", 0].reason is FinishReason.FAILED
    driver.assert_nothing_is_held()


@pytest.mark.parametrize(
    ("piece", "reason"),
    [
        (b"\0\0\0", FinishReason.REJECTED),
        (packed([256]), FinishReason.REJECTED),
        (packed([2**32 - 1]), FinishReason.REJECTED),
        (packed([1] * 201), FinishReason.REJECTED),
        (packed([1] * 150), FinishReason.FAILED),
    ],
)
def test_a_piece_that_cannot_be_ends_the_request(piece, reason):
    driver = Driver(window_tokens=128)
    driver.open("a", 200)
    driver.ask("b", some_tokens(20))
    driver.engine.extend("a", piece)
    driver.run()
    assert driver.ended["a", 0].reason is reason
    assert driver.ended["b", 0].reason is FinishReason.LENGTH
    driver.assert_nothing_is_held()


def test_more_prompt_after_the_answer_began_fails_the_request():
    driver = Driver()
    driver.ask("a", some_tokens(20), new=50)
    driver.step()
    driver.engine.extend("a", packed([1]))
    driver.run()
    assert driver.ended["a", 0].reason is FinishReason.FAILED


def test_the_window_moves_with_what_is_computed():
    driver, prompt = Driver(window_tokens=128), some_tokens(1000)
    driver.open("a", 1000)
    sent = 0
    for _ in range(100):
        computed = driver.progress["a"][-1][0] if driver.progress["a"] else 0
        piece = prompt[sent : computed + 128]
        driver.engine.extend("a", packed(piece))
        sent += len(piece)
        driver.step()
    assert driver.drawn["a", 0] == driver.network.answer(prompt, 5)


class BrokenNetwork(FakeNetwork):
    """Raises, or gives NaN, for sequences that hold token 251."""

    def __init__(self, *, raises: bool) -> None:
        super().__init__()
        self.raises = raises

    def forward(self, batch: Batch) -> torch.Tensor:
        logits = super().forward(batch)
        if 251 in batch.token_ids:
            if self.raises:
                raise RuntimeError("out of memory")
            for place, at in enumerate(batch.logit_rows):
                row = next(row for row in batch.rows if row.start <= at < row.start + row.tokens)
                if 251 in batch.token_ids[row.start : row.start + row.tokens]:
                    logits[place] = float("nan")
        return logits


def test_a_step_that_raises_costs_its_batch_and_caches_nothing_of_it():
    driver = Driver(BrokenNetwork(raises=True))
    driver.ask("a", [*some_tokens(100), 251])
    driver.run()
    assert driver.ended["a", 0].reason is FinishReason.FAILED
    assert "out of memory" in driver.ended["a", 0].message
    assert not driver.held
    driver.ask("b", some_tokens(100))
    driver.run()
    assert driver.drawn["b", 0] == driver.network.answer(some_tokens(100), 5)
    driver.assert_nothing_is_held()


class LostDevice(BrokenNetwork):
    """A device that fails at token 251 and in every step from then on, or answers again."""

    def __init__(self, *, recovers: bool) -> None:
        super().__init__(raises=True)
        self.recovers, self.is_lost = recovers, False

    def forward(self, batch: Batch) -> torch.Tensor:
        if self.is_lost:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return super().forward(batch)

    def device_answers(self) -> bool:
        self.is_lost = not self.recovers
        return self.recovers


def test_a_device_that_does_not_answer_after_a_failed_step_ends_the_engine():
    driver = Driver(LostDevice(recovers=False))
    driver.ask("a", [*some_tokens(100), 251])
    with pytest.raises(DeviceLost, match="does not answer after a step failed: out of memory"):
        driver.run()


def test_a_device_that_answers_after_a_failed_step_serves_the_next_request():
    driver = Driver(LostDevice(recovers=True))
    driver.ask("a", [*some_tokens(100), 251])
    driver.run()
    driver.ask("b", some_tokens(100))
    driver.run()
    assert driver.ended["a", 0].reason is FinishReason.FAILED
    assert driver.drawn["b", 0] == driver.network.answer(some_tokens(100), 5)


def test_a_device_that_draws_ends_the_engine_too_when_its_tokens_cannot_be_collected():
    class Lost(FakeDevice):
        def collect(self, ticket: Hashable) -> list[int | None]:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

        def device_answers(self) -> bool:
            return False

    driver = Driver(Lost())
    driver.ask("a", some_tokens(10))
    with pytest.raises(DeviceLost, match="illegal memory access"):
        driver.run()


def test_nan_costs_its_own_request_only_and_leaves_none_of_it_in_the_cache():
    driver = Driver(BrokenNetwork(raises=False), chunk_tokens=64)
    driver.ask("a", [*some_tokens(100), 251])
    driver.ask("b", some_tokens(100, 1))
    driver.run()
    assert driver.ended["a", 0].reason is FinishReason.FAILED
    assert driver.drawn["b", 0] == driver.network.answer(some_tokens(100, 1), 5)
    assert driver.held == set(block_keys(packed(some_tokens(100, 1)), root_key("m", "")))
    driver.assert_nothing_is_held()


@pytest.mark.parametrize(
    "params",
    [
        {"repetition_penalty": 1e-38},
        {"frequency_penalty": -3e38},
        {"frequency_penalty": -3e38, "top_k": 5},
        {"stop_token_ids": frozenset(range(256)), "min_new_tokens": 5},
    ],
    ids=["infinite", "infinite by count", "infinite and filtered", "all forbidden"],
)
def test_parameters_that_leave_no_token_to_draw_cost_their_own_request_only(params):
    driver = Driver()
    driver.ask("a", some_tokens(100), new=8, temperature=1.0, seed=1, **params)
    driver.ask("b", some_tokens(100, 1))
    driver.run()
    assert driver.ended["a", 0].reason is FinishReason.FAILED
    assert "no token to draw" in driver.ended["a", 0].message
    assert driver.drawn["b", 0] == driver.network.answer(some_tokens(100, 1), 5)
    driver.assert_nothing_is_held()


def test_a_cleared_cache_is_reported_and_running_sequences_go_on():
    driver, prompt = Driver(), some_tokens(200)
    driver.ask("a", prompt, new=100)
    driver.step()
    driver.engine.clear_cache()
    assert driver.engine.has_work
    driver.step()
    assert not driver.held
    driver.run()
    assert driver.drawn["a", 0] == driver.network.answer(prompt, 100)
    driver.assert_nothing_is_held()


def test_an_idle_engine_reports_nothing():
    driver = Driver()
    assert not driver.engine.has_work
    report = driver.engine.step()
    assert (report.drawn, report.progress, report.finished, report.cache) == ((), (), (), ())


def test_load_counts_what_runs_waits_and_is_not_computed():
    driver = Driver(max_running=1)
    driver.ask("a", some_tokens(100), new=10)
    driver.ask("b", some_tokens(70, 1))
    load = driver.engine.step().load
    assert (load.running, load.waiting, load.waiting_tokens) == (1, 1, 70)
    assert (load.blocks_total, load.blocks_free) == (64, 62)


def test_options_that_hold_no_block_are_refused():
    with pytest.raises(ValueError, match="hold no KV block"):
        Driver(kv_blocks=None, kv_bytes=10)
    with pytest.raises(ValueError, match="a block of 64 must fit in"):
        Driver(window_tokens=10)


class UnhostedNetwork(FakeNetwork):
    host_memory = None


class VastNetwork(FakeNetwork):
    """No machine holds its KV."""

    def allocate(self, blocks: int) -> None:
        torch.empty(2**50)


class VastHostNetwork(FakeNetwork):
    """No machine holds its KV beside the device."""

    def host_memory(self, slots: int) -> FakeHostMemory:
        torch.empty(2**50)
        return super().host_memory(slots)


@pytest.mark.parametrize(("network", "message"), [(VastNetwork(), "the pool"), (VastHostNetwork(), "the host tier")])
def test_memory_that_the_system_does_not_have_is_refused_by_name(network, message):
    with pytest.raises(NotEnoughMemory, match=f"GiB of KV.*give {message} less"):
        Driver(network, host_bytes=10**6)


def test_host_memory_for_a_network_that_cannot_move_its_kv_is_refused():
    with pytest.raises(ValueError, match="cannot be moved to the host"):
        Driver(UnhostedNetwork(), host_bytes=10**6)


def test_an_engine_can_be_closed_with_and_without_host_memory():
    for host_bytes in (0, 10**6):
        Driver(host_bytes=host_bytes).engine.close()


@pytest.mark.parametrize("seed", range(15))
def test_nothing_leaks_or_stalls_in_a_random_life(seed):
    rng = random.Random(seed)
    driver = Driver(kv_blocks=rng.choice([10, 30]), lanes=rng.choice([1, 4]), max_running=6, max_waiting=8)
    prompts: dict[int, list[int]] = {}
    sent: dict[int, int] = {}
    for key in range(60):
        prompts[key] = some_tokens(rng.choice([64, 128, 200]), rng.randint(0, 3)) + some_tokens(rng.randint(0, 90), key)
        choices = rng.choice([1, 1, 2])
        driver.open(key, len(prompts[key]), rng.randint(1, 80), choices=choices, domain=rng.choice("ab"))
        sent[key] = 0
        for _ in range(rng.randint(0, 6)):
            other = rng.choice(list(prompts))
            roll = rng.random()
            if roll < 0.1:
                driver.engine.cancel(other)
            elif roll < 0.2:
                driver.engine.pace(other, paused=rng.random() < 0.3, rank=rng.randint(0, 3))
            elif roll < 0.6 and (other, 0) not in driver.ended:
                count = rng.choice([10, 100, 1000])
                piece = prompts[other][sent[other] : sent[other] + count]
                sent[other] += len(piece)
                driver.engine.extend(other, packed(piece))
            driver.step()
        if rng.random() < 0.02:
            driver.engine.clear_cache()
    for key, prompt in prompts.items():
        driver.engine.pace(key, paused=False)
        if (key, 0) not in driver.ended:
            driver.engine.extend(key, packed(prompt[sent[key] :]))
    driver.run()
    for (key, choice), finished in driver.ended.items():
        answer = driver.drawn[key, choice]
        assert answer == driver.network.answer(prompts[key], len(answer))
        assert finished.output_tokens == len(answer)
    assert {key for key, _ in driver.ended} == set(prompts)
    driver.assert_nothing_is_held()


def flood(driver: Driver, prompts: int = 12) -> None:
    """Ask so much else that whatever may be evicted is."""
    for _ in range(prompts):
        driver.ask(("flood", len(driver.ended)), some_tokens(600, 100 + len(driver.ended)))
        driver.run()


def a_pinning_driver(**options: object) -> Driver:
    return Driver(**{"pool": PoolOptions(pin_share=0.5), **options})


def test_a_pinned_prefix_outlives_a_flood_until_its_time_is_over():
    driver, prompt = a_pinning_driver(), some_tokens(640)
    driver.ask("cold", prompt, domain="acme")
    driver.run()
    keys = block_keys(packed(prompt), root_key("m", "acme"))
    assert driver.engine.pin("p", keys, domain="acme", for_s=60.0) == Pinned(held=10, pinned=10)
    assert driver.engine.step().load.blocks_pinnable == 22
    flood(driver)
    driver.ask("warm", [*prompt, 1], domain="acme")
    driver.run()
    assert driver.ended["warm", 0].cached_tokens == 640
    driver.clock.now_s = 60.0
    flood(driver, 13)
    driver.ask("late", [*prompt, 1], domain="acme")
    driver.run()
    assert driver.ended["late", 0].cached_tokens == 0
    driver.assert_nothing_is_held()


def test_a_pin_that_ends_on_an_idle_engine_is_reported_as_room():
    driver = a_pinning_driver()
    driver.ask("a", some_tokens(129))
    driver.run()
    room = driver.engine.step().load.blocks_pinnable
    driver.engine.pin("p", sorted(driver.held), domain="", for_s=60.0)
    assert driver.engine.step().load.blocks_pinnable == room - 2
    assert not driver.engine.has_work
    driver.clock.now_s = 60.0
    assert driver.engine.has_work
    assert driver.engine.step().load.blocks_pinnable == room
    assert not driver.engine.has_work


def test_what_is_unpinned_is_evicted_like_anything_else():
    driver, prompt = a_pinning_driver(), some_tokens(640)
    driver.ask("cold", prompt)
    driver.run()
    driver.engine.pin("p", block_keys(packed(prompt), root_key("m", "")), domain="", for_s=60.0)
    assert driver.engine.unpin("p") == 10
    flood(driver)
    driver.ask("again", prompt)
    driver.run()
    assert driver.ended["again", 0].cached_tokens == 0


def test_only_what_is_cached_and_has_room_is_pinned():
    driver, prompt = a_pinning_driver(pool=PoolOptions(pin_share=0.1)), some_tokens(640)
    driver.ask("cold", prompt)
    driver.run()
    keys = block_keys(packed(some_tokens(700)), root_key("m", ""))
    assert driver.engine.pin("p", [*keys, 5], domain="", for_s=60.0) == Pinned(held=10, pinned=6)
    assert driver.engine.pin("q", keys, domain="another", for_s=60.0) == Pinned(held=0, pinned=0)


@pytest.mark.parametrize("host_bytes", [0, 64 * FakeNetwork().block_bytes])
def test_a_cleared_domain_misses_another_one_hits_and_what_runs_goes_on(host_bytes: int):
    driver, prompt = a_pinning_driver(host_bytes=host_bytes, kv_blocks=32), some_tokens(200)
    for domain in ("acme", "labs"):
        driver.ask(("first", domain), prompt, domain=domain)
        driver.run()
    driver.engine.pin("p", block_keys(packed(prompt), root_key("m", "acme")), domain="acme", for_s=60.0)
    running = some_tokens(300, 7)
    driver.ask("running", running, new=100, domain="acme")
    driver.step()
    driver.step()
    assert driver.engine.clear_cache("acme") >= 3
    assert driver.engine.has_work
    driver.step()
    for domain in ("acme", "labs"):
        driver.ask(("second", domain), prompt, domain=domain)
    driver.run()
    assert driver.ended[("second", "acme"), 0].cached_tokens == 0
    assert driver.ended[("second", "labs"), 0].cached_tokens == 192
    assert driver.drawn["running", 0] == driver.network.answer(running, 100)
    assert driver.engine.step().load.blocks_pinnable == 16
    driver.assert_nothing_is_held()
