from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from benchmarks.draft_model import deepened, perturbed
from shards.bundled import weights
from shards.draft_model import CHUNK_TOKENS, DraftModel
from shards.engine import Engine, EngineOptions
from shards.exec.fake import FakeNetwork
from shards.kv.keys import BLOCK_TOKENS
from shards.model import Model
from shards.nouns import FinishReason, SamplingParams, Submission
from shards.sched.cost import CostModel
from shards.shortage import NotEnoughMemory
from tests.shards.copying import CopyingNetwork
from tests.shards.drafting import KINDS, LARGE_S, SMALL_S, DraftingDriver, TimedNetwork
from tests.shards.driver import EOS, Clock, Driver, a_tokenizer, packed, some_tokens
from tests.shards.test_speculation import SETTINGS


def answered(driver: Driver, *, requests: int = 3, new: int = 80, **sampling: Any) -> Driver:
    for key in range(requests):
        driver.ask(key, some_tokens(150 + key, seed=key), new=new, **sampling)
    driver.run()
    driver.assert_nothing_is_held()
    return driver


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_takes_fewer_steps_the_more_often_the_small_model_is_right(kind):
    drivers = [answered(DraftingDriver(eighths, kind=kind)) for eighths in (None, 4, 7, 8)]
    assert all(driver.drawn == drivers[0].drawn for driver in drivers)
    steps = [driver.network.calls for driver in drivers]
    assert steps == sorted(steps, reverse=True)
    assert steps[-1] < steps[0] / 5
    seconds = [driver.clock.now_s for driver in drivers]
    assert seconds[-1] < seconds[0] / 3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
def test_every_sampling_setting_draws_what_it_draws_without(sampling, kind):
    fast, slow = (answered(DraftingDriver(eighths, kind=kind), new=60, **sampling) for eighths in (6, None))
    assert fast.drawn == slow.drawn
    assert fast.ended == slow.ended
    looks_back = {"repetition_penalty", "presence_penalty"} & sampling.keys()
    assert (fast.guessed == (0, 0)) == bool(looks_back)


def test_sampled_guesses_are_right_more_often_than_the_likeliest_token_would_be():
    # a model that agrees draws the same token with the same random number, even if it is an unlikely one
    driver = answered(DraftingDriver(8), temperature=1.5, seed=3)
    drafted, accepted = driver.guessed
    assert accepted == drafted > 100


def test_a_model_that_is_never_right_is_soon_asked_no_more():
    bad, without = DraftingDriver(0), DraftingDriver(None)
    for driver in (bad, without):
        for key in range(18):
            driver.ask(key, some_tokens(100, seed=key), new=60)
            if key % 3 == 2:
                driver.run()
    assert bad.drawn == without.drawn
    assert bad.clock.now_s < 1.15 * without.clock.now_s
    drafted, accepted = bad.guessed
    assert accepted < drafted < 0.25 * 18 * 60


def test_a_model_that_got_better_is_tried_again():
    driver = DraftingDriver(0)
    for number in range(3):
        driver.ask(("bad", number), some_tokens(100, seed=number), new=100)
        driver.run()
    driver.small._eighths = 8
    before = driver.guessed[1]
    for number in range(6):
        driver.ask(("good", number), some_tokens(100, seed=50 + number), new=200)
        driver.run()
    assert driver.guessed[1] - before > 200


def test_a_model_that_was_measured_in_a_bad_moment_is_tried_again():
    clock = Clock()
    small = TimedNetwork(clock, 10 * LARGE_S)
    driver = DraftingDriver(8, clock=clock, small=small)
    small._step_s = SMALL_S
    for key in range(5):
        driver.ask(key, some_tokens(100, seed=key), new=100)
        driver.run()
    assert driver.guessed[1] > 200


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "seed": 7}], ids=["greedy", "sampled"])
def test_a_real_model_answers_the_same_in_float32(sampling, tmp_path):
    large = deepened(weights(), tmp_path / "large", 6)
    small = perturbed(weights(), tmp_path / "small", 0.1)
    prompts = [list(range(20, 90)), list(range(300, 345)), list(range(5, 200, 3))]
    drivers = []
    for has_drafts in (True, False):
        drafts = DraftModel(Model.load(small), 2**24, clock=Clock()) if has_drafts else None
        if drafts is not None:
            # a tenth of what the engine supposes of the large one, as no time passes
            drafts._cost = CostModel(prior=(2e-4, 1e-5, 1e-10, 1e-9))
        model = Model.load(large)
        engine = Engine(model, EngineOptions(kv_blocks=64), clock=Clock(), draft_model=drafts)
        drawn: dict[int, list[int]] = {key: [] for key in range(3)}
        for key, prompt in enumerate(prompts):
            engine.submit(Submission(key, len(prompt), 60, sampling=SamplingParams(ignore_eos=True, **sampling)))
            engine.extend(key, packed(prompt))
        while engine.has_work:
            report = engine.step()
            engine.check()
            for draw in report.drawn:
                drawn[draw.key] += draw.token_ids
        drivers.append((drawn, report.load))
    (fast, load), (slow, _) = drivers
    assert fast == slow
    assert 0 < load.model_accepted_tokens < load.model_drafted_tokens


def test_many_rows_guess_less_than_one():
    def share(rows: int) -> float:
        driver = DraftingDriver(7, draft_blocks=64 * 8, kv_blocks=64 * 8, max_running=64)
        # a device has time for many rows; here each row takes as long as a tenth of a step
        driver.network.forward = _slow_rows(driver)
        for key in range(rows):
            driver.ask(key, some_tokens(100, seed=key), new=50)
        while driver.engine.has_work:
            driver.step(check=False)
        return driver.guessed[0] / rows

    assert share(40) < share(1) / 2


def _slow_rows(driver):
    forward = driver.network.forward

    def slow(batch):
        driver.clock.now_s += LARGE_S / 10 * len(batch.token_ids)
        return forward(batch)

    return slow


def test_where_the_prompt_repeats_lookup_guesses_and_elsewhere_the_model():
    class Slow(CopyingNetwork):
        def forward(self, batch):
            clock.now_s += LARGE_S
            return super().forward(batch)

    def a_driver(network, **more):
        small = Model("small", TimedNetwork(clock, SMALL_S, eighths=8), a_tokenizer(), frozenset({EOS}))
        drafts = DraftModel(small, 64 * small.network.block_bytes, clock=clock)
        drafts.prepare(4)
        return Driver(network, clock=clock, draft_model=drafts, **more)

    clock = Clock()
    driver = a_driver(Slow(likes=8))
    driver.ask("a", some_tokens(40) * 6, new=120)
    driver.run()
    assert driver.drawn["a", 0] == CopyingNetwork(likes=8).answer(some_tokens(40) * 6, 120)
    # the small network does not copy, so it is hardly ever right
    assert driver.load.accepted_tokens - driver.load.model_accepted_tokens > 60
    assert driver.load.model_drafted_tokens < driver.load.drafted_tokens / 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("seed", "draft_blocks"), [(0, 4), (1, 9), (2, 30), (3, 9), (4, 4)])
def test_preempted_cancelled_and_late_answers_leave_nothing_and_are_the_same(seed, draft_blocks, kind):
    rng = random.Random(seed)
    driver = DraftingDriver(
        rng.choice([5, 7, 8]),
        kind=kind,
        draft_blocks=draft_blocks,
        kv_blocks=20,
        max_running=3,
        preempt_cooldown_s=0.0,
        host_bytes=rng.choice([0, 64 * BLOCK_TOKENS * 8]),
    )
    asked: dict[int, tuple[list[int], int]] = {}
    for key in range(12):
        # some begin alike, some are the same
        prompt = some_tokens(rng.randint(10, 130), seed=1) + some_tokens(rng.randint(1, 90), seed=key % 3)
        asked[key] = (prompt, rng.randint(1, 120))
        deadline_s = driver.clock.now_s + rng.uniform(0.01, 2) if rng.random() < 0.2 else None
        driver.ask(key, prompt, new=asked[key][1], rank=rng.randint(0, 2), deadline_s=deadline_s)
        for _ in range(rng.randint(0, 15)):
            driver.step()
        if rng.random() < 0.2:
            driver.engine.cancel(rng.choice(list(asked)))
        if rng.random() < 0.1:
            driver.engine.clear_cache()
    driver.run()
    for key, (prompt, new) in asked.items():
        whole, drawn = FakeNetwork().answer(prompt, new), driver.drawn[key, 0]
        is_whole = driver.ended[key, 0].reason is FinishReason.LENGTH
        assert drawn == (whole if is_whole else whole[: len(drawn)])
    driver.assert_nothing_is_held()


def test_a_preempted_answer_is_followed_again_from_what_is_cached():
    driver = DraftingDriver(8, max_running=1, preempt_cooldown_s=0.0)
    driver.ask("low", some_tokens(300), new=200, rank=3)
    while len(driver.drawn["low", 0]) < 40:
        driver.step()
    before = sum(driver.small.computed)
    driver.ask("high", some_tokens(100, seed=1), new=10, rank=0)
    driver.run()
    assert driver.drawn["low", 0] == FakeNetwork().answer(some_tokens(300), 200)
    # the 300 tokens are not computed again, but for those behind the last full block
    assert sum(driver.small.computed) - before < 100 + 10 + 160 + 2 * BLOCK_TOKENS + 60
    driver.assert_nothing_is_held()


def test_a_prompt_that_begins_as_an_earlier_one_is_computed_from_there():
    driver = DraftingDriver(8)
    for key, rest in (("a", 7), ("b", 8)):
        driver.ask(key, some_tokens(8 * BLOCK_TOKENS) + some_tokens(20, seed=rest), new=60)
        driver.run()
        computed = max(driver.small.computed)
        driver.small.computed.clear()
        assert computed == (CHUNK_TOKENS if key == "a" else 21)


def test_choices_of_one_prompt_compute_it_once():
    driver = DraftingDriver(8)
    driver.ask("a", some_tokens(400), new=60, choices=4, temperature=0.8, seed=3)
    driver.run()
    slow = DraftingDriver(None)
    slow.ask("a", some_tokens(400), new=60, choices=4, temperature=0.8, seed=3)
    slow.run()
    assert driver.drawn == slow.drawn
    assert sum(driver.small.computed) < 400 + 4 * (17 + 60 + 30)


def test_another_tenants_prompt_is_not_shared():
    driver = DraftingDriver(8)
    for domain in ("a", "b"):
        driver.ask(domain, some_tokens(8 * BLOCK_TOKENS), new=60, domain=domain)
        driver.run()
        assert max(driver.small.computed) == CHUNK_TOKENS
        driver.small.computed.clear()
    driver.engine.clear_cache("a")
    for domain, most in (("a", CHUNK_TOKENS), ("b", 65)):
        driver.ask((domain, 2), some_tokens(8 * BLOCK_TOKENS), new=60, domain=domain)
        driver.run()
        assert max(driver.small.computed) <= most
        assert (max(driver.small.computed) == CHUNK_TOKENS) == (domain == "a")
        driver.small.computed.clear()


def test_a_long_prompt_is_computed_in_chunks_beside_decoding_and_never_beside_a_prompt():
    driver = DraftingDriver(8, kv_blocks=200, draft_blocks=100, chunk_tokens=256)
    driver.ask("a", some_tokens(2000), new=150)
    while not driver.drawn["a", 0]:
        assert not driver.small.computed
        driver.step()
    while driver.guessed == (0, 0):
        driver.step()
    *chunks, rest = driver.small.computed[:4]
    assert (chunks, rest) == ([512] * 3, 2000 - 3 * 512 + 4)
    assert driver.network.computed[-1] > 1
    computed = len(driver.small.computed)
    driver.ask("b", some_tokens(2000, seed=1), new=1)
    while ("b", 0) not in driver.ended:
        driver.step()
        assert len(driver.small.computed) == computed
    driver.run()


def test_a_short_rest_of_an_answer_is_not_worth_its_prompt():
    driver = DraftingDriver(8, kv_blocks=200, draft_blocks=100)
    # 1 ms for each 10 tokens
    forward = driver.small.forward

    def slow(batch):
        driver.clock.now_s += 1e-4 * len(batch.token_ids)
        return forward(batch)

    driver.small.forward = slow
    driver.engine.draft_model.prepare(1)
    driver.small.computed.clear()
    driver.ask("short", some_tokens(3000), new=8)
    driver.run()
    assert not driver.small.computed
    driver.ask("long", some_tokens(3000), new=200)
    driver.run()
    assert driver.guessed[1] > 100


def test_answers_without_room_in_the_draft_models_kv_are_not_followed():
    driver = DraftingDriver(8, draft_blocks=5)
    driver.ask("large", some_tokens(400), new=60)
    driver.run()
    assert driver.guessed == (0, 0)
    driver.ask("small", some_tokens(100), new=60)
    driver.ask("other", some_tokens(230, seed=1), new=60)
    while driver.engine.has_work:
        driver.step()
        assert driver.engine.draft_model.pool.owned <= 5
    assert driver.guessed[1] > 0
    for key, prompt in (("large", some_tokens(400)), ("small", some_tokens(100)), ("other", some_tokens(230, seed=1))):
        assert driver.drawn[key, 0] == FakeNetwork().answer(prompt, 60)


def test_beyond_the_small_models_context_nothing_is_guessed():
    clock = Clock()
    driver = DraftingDriver(8, clock=clock, small=TimedNetwork(clock, SMALL_S, context_tokens=200))
    driver.ask("a", some_tokens(100), new=200)
    driver.run()
    assert driver.drawn["a", 0] == FakeNetwork().answer(some_tokens(100), 200)
    assert 60 < driver.guessed[1] < 100


def test_tokens_that_the_small_model_does_not_have_end_its_guesses():
    clock = Clock()
    tokenizers = [a_tokenizer(), a_tokenizer()]
    small = Model("small", TimedNetwork(clock, SMALL_S, vocabulary=200), tokenizers[0], frozenset({EOS}))
    drafts = DraftModel(small, 64 * small.network.block_bytes, clock=clock)
    drafts.prepare(1)
    driver = Driver(TimedNetwork(clock, LARGE_S), clock=clock, draft_model=drafts)
    bias = dict.fromkeys((3, 5, 7, 9, 250), 50.0)
    driver.ask("has", [token % 200 for token in some_tokens(100)], new=60, logit_bias=bias)
    driver.ask("lacks", [*some_tokens(100), 249], new=60)
    driver.run()
    slow = Driver(TimedNetwork(clock, LARGE_S), clock=clock)
    slow.ask("has", [token % 200 for token in some_tokens(100)], new=60, logit_bias=bias)
    slow.ask("lacks", [*some_tokens(100), 249], new=60)
    slow.run()
    assert driver.drawn == slow.drawn
    assert drafts.pool.owned == 0


class Failing(TimedNetwork):
    """Fails once it was asked `after` times."""

    after = 1 << 30

    def forward(self, batch):
        self.after -= 1
        if self.after < 0:
            raise RuntimeError("the small one is broken")
        return super().forward(batch)


@pytest.mark.parametrize("after", [0, 1, 2, 5, 12])
def test_answers_go_on_without_a_draft_model_that_fails(after, caplog):
    clock = Clock()
    small = Failing(clock, SMALL_S)
    driver = DraftingDriver(8, clock=clock, small=small)
    small.after = after
    answered(driver)
    assert driver.drawn == answered(DraftingDriver(None)).drawn
    assert [record.message for record in caplog.records if "draft model" in record.message] == [
        "the draft model small failed and is not used any more"
    ]
    assert small.after == -1


class Numb(TimedNetwork):
    """Not a number behind each seventh position."""

    def _logits(self, tokens):
        logits = super()._logits(tokens)
        return np.full_like(logits, np.nan) if len(tokens) % 7 == 0 else logits


def test_logits_of_the_small_model_that_are_no_numbers_end_a_draft():
    clock = Clock()
    driver = answered(DraftingDriver(8, clock=clock, small=Numb(clock, SMALL_S)))
    assert driver.drawn == answered(DraftingDriver(None)).drawn
    drafted, accepted = driver.guessed
    assert drafted == accepted > 50


@pytest.mark.parametrize("run_ahead", ["on", "off"])
def test_a_device_runs_ahead_where_nothing_is_guessed(run_ahead):
    driver = DraftingDriver(8, kind=KINDS[1], run_ahead=run_ahead, kv_blocks=200)
    driver.ask("a", some_tokens(600), new=100)
    driver.run()
    assert driver.drawn["a", 0] == FakeNetwork().answer(some_tokens(600), 100)
    assert driver.guessed[1] > 60
    assert driver.network.most_due == (2 if run_ahead == "on" else 1)


def test_steps_with_drafts_have_no_more_rows_than_a_device_was_prepared_for():
    driver = DraftingDriver(8, kind=KINDS[1], max_running=20, kv_blocks=200, draft_blocks=200)
    driver.network.most_rows = 30
    driver.engine._scheduler._drafting = driver.engine._scheduler._drafting._replace(most_drawn=30)
    rows = []
    submit = driver.network.submit
    driver.network.submit = lambda batch, drawings: (rows.append(len(batch.rows)), submit(batch, drawings))[1]
    for key in range(20):
        driver.ask(key, some_tokens(60, seed=key), new=60)
    driver.run()
    assert driver.guessed[1] > 60
    assert 20 < max(rows) <= 30


def a_model(name: str, tokenizer: Any, vocabulary: int = 256) -> Model:
    return Model(name, FakeNetwork(vocabulary=vocabulary), tokenizer)


def test_a_draft_model_with_other_tokens_is_refused():
    other = a_tokenizer()
    other.add_tokens(["<new>"])
    mistake = (
        r"the draft model small has 257 tokens and m has 256, and they are not the same \(the first that differs is "
        r"256\): choose a draft model with the same tokenizer"
    )
    with pytest.raises(ValueError, match=mistake):
        Driver(draft_model=DraftModel(a_model("small", other), 2**20))
    with pytest.raises(ValueError, match="one of them has no tokenizer"):
        Driver(draft_model=DraftModel(a_model("small", None), 2**20))
    # logits may be padded to another size
    Driver(draft_model=DraftModel(a_model("small", a_tokenizer(), 512), 2**20))


@pytest.mark.parametrize("options", [{"deterministic": True}, {"speculate": "off"}])
def test_a_draft_model_beside_an_engine_that_verifies_nothing_is_refused(options):
    with pytest.raises(ValueError, match=r"a draft model guesses tokens, and with .* none are verified: leave one out"):
        DraftingDriver(8, **options)


def test_memory_that_holds_no_block_is_refused():
    with pytest.raises(ValueError, match="hold no KV block of the draft model"):
        DraftModel(a_model("small", a_tokenizer()), 10)


def test_memory_that_is_not_there_is_refused():
    class Huge(FakeNetwork):
        def allocate(self, blocks):
            raise MemoryError

    with pytest.raises(NotEnoughMemory, match=r"there is no memory for 0.000977 GiB of the draft model's KV"):
        DraftModel(Model("small", Huge()), 2**20)
