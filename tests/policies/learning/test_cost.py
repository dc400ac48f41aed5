import math
import random
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import astuple, replace

from policies.learning.cost import (
    PRIORS,
    TYPICAL,
    Ahead,
    FadingSum,
    Latency,
    LatencyModel,
    ObservationSample,
    Peers,
    SlowTime,
    Turnover,
    Work,
    p99_factor,
    prefill_work,
    prior_of,
)

FLEET = {
    "8B on an H200": Latency(0.01, 17.7e-6, 1.17e-9, 1.0, 0.1, 3.5e-3, 1e-5, 30e-9),
    "a CPU": Latency(0.05, 5e-3, 1e-7, 0.8, 0.8, 0.2, 2e-3, 1e-6),
    "faster than any guess": Latency(0.004, 3e-6, 2e-10, 0.3, 0.02, 1e-3, 5e-6, 5e-9),
    "one prompt at a time": Latency(0.1, 4e-4, 1e-8, 1.0, 1.0, 0.05, 1e-2, 1e-7),
    "no attention to speak of": Latency(0.02, 5e-5, 3e-12, 0.05, 0.05, 0.01, 1e-4, 1e-10),
    "far away": Latency(1.5, 5e-5, 2e-9, 0.5, 0.01, 0.02, 1e-4, 1e-8),
}
NOISE = 0.1


def prompts(rng: random.Random, *, shortest: int = 200, longest: int = 100_000) -> Iterator[tuple[float, float, Ahead]]:
    """Uncached and cached tokens, and the prefill in front: half of the time none, else of one prompt."""
    while True:
        uncached = math.exp(rng.uniform(math.log(shortest), math.log(longest)))
        cached = rng.choice([0.0, 0.0, 3 * uncached * rng.random()])
        yield uncached, cached, behind(math.exp(rng.uniform(5, 10)), uncached) if rng.random() < 0.5 else Ahead()


def behind(other: float, tokens: float) -> Ahead:
    """The work ahead of a prompt behind one `other`."""
    whole, share = prefill_work(other), min(1.0, tokens / other)
    alike = Work(whole.tokens * share, whole.pairs * share)
    return Ahead(alike, Work(whole.tokens - alike.tokens, whole.pairs - alike.pairs))


def errors_of(model: LatencyModel, truth: Latency, count: int, *, seed: int = 0, hiccups: float = 0.0) -> list[float]:
    """Relative errors of `count` predictions, each made before `model` learnt what was seen."""
    rng, errors = random.Random(seed), []
    for uncached, cached, ahead in (prompt for prompt, _ in zip(prompts(rng), range(count), strict=False)):
        now = model.snapshot()
        predicted_s = now.ttft_s(uncached, cached, queue_s=now.queue_s(ahead))
        seen_s = truth.ttft_s(uncached, cached, queue_s=truth.queue_s(ahead)) * math.exp(rng.gauss(0, NOISE))
        errors.append(abs(predicted_s - seen_s) / seen_s)
        if rng.random() < hiccups:
            seen_s += 30.0
        model.observe_ttft(prefill_work(uncached, cached), ahead, seen_s)
        model.check()
    return errors


def mean(numbers: list[float]) -> float:
    return sum(numbers) / len(numbers)


@pytest.mark.parametrize("truth", FLEET.values(), ids=FLEET)
def test_any_backend_is_known_after_a_few_requests_from_the_same_guess(truth: Latency) -> None:
    model = LatencyModel()
    errors = errors_of(model, truth, 140)
    # one of them may be the first that meets a longer prompt
    assert sorted(errors[20:40])[10] < 0.2
    assert mean(errors[100:]) < 1.3 * NOISE
    learnt = model.snapshot()
    for uncached, cached in ((500, 0), (500, 50_000), (100_000, 0)):
        assert learnt.ttft_s(uncached, cached) == pytest.approx(truth.ttft_s(uncached, cached), rel=0.25)


@pytest.mark.parametrize("factor", [3.0, 1 / 3])
@pytest.mark.parametrize("truth", FLEET.values(), ids=FLEET)
def test_a_backend_that_becomes_slower_or_faster_is_followed_within_ten_requests(truth: Latency, factor: float) -> None:
    model = LatencyModel()
    errors_of(model, truth, 150)
    times = {name: getattr(truth, name) * factor for name in ("fixed_s", "token_s", "pair_s")}
    errors = errors_of(model, replace(truth, **times), 40, seed=1)
    assert mean(errors[10:]) < 2 * NOISE


@pytest.mark.parametrize("truth", FLEET.values(), ids=FLEET)
def test_hiccups_of_half_a_minute_do_not_wreck_it(truth: Latency) -> None:
    model = LatencyModel()
    errors = sorted(errors_of(model, truth, 300, hiccups=0.03)[40:])
    assert errors[len(errors) // 2] < 1.3 * NOISE
    before = model.snapshot().ttft_s(2000)
    model.observe_ttft(prefill_work(2000), Ahead(), before + 30.0)
    assert model.snapshot().ttft_s(2000) < 1.3 * before + 0.3


def test_the_speed_of_short_prompts_holds_for_long_ones_too() -> None:
    truth, model = FLEET["8B on an H200"], LatencyModel()
    for _ in range(30):
        model.observe_ttft(prefill_work(1000), Ahead(), truth.ttft_s(1000))
    assert model.snapshot().ttft_s(100_000) == pytest.approx(truth.ttft_s(100_000), rel=0.3)


@pytest.mark.parametrize("truth", FLEET.values(), ids=FLEET)
def test_a_step_of_decoding_is_learnt_by_batch_and_context(truth: Latency) -> None:
    model, rng = LatencyModel(), random.Random(3)
    for _ in range(120):
        batch = rng.randint(1, 64)
        context_tokens = batch * rng.choice([500.0, 4000.0, 60_000.0])
        seen_s = truth.tpot_s(batch, context_tokens) * math.exp(rng.gauss(0, NOISE))
        model.observe_decode(batch, context_tokens, seen_s)
        model.check()
    for batch, context_tokens in ((1, 1000), (8, 100_000), (64, 60_000)):
        assert model.snapshot().tpot_s(batch, context_tokens) == pytest.approx(
            truth.tpot_s(batch, context_tokens), rel=0.25
        )


@pytest.mark.parametrize("kind", ["shard", "vllm", "ollama", "unheard-of"])
def test_predictions_are_usable_before_anything_was_seen(kind: str) -> None:
    latency = LatencyModel(Peers(prior_of(kind))).snapshot()
    short, long = latency.ttft_s(1000), latency.ttft_s(100_000)
    assert 0.01 < short < 1.0 < long < 300
    assert long > 100_000 / 1000 * (short - latency.fixed_s)
    assert latency.ttft_s(1000, 99_000) < long / 10
    assert latency.tpot_s(8, 8000) < 8 * latency.tpot_s(1, 1000)


def test_a_reported_speed_counts_until_the_first_answer() -> None:
    model = LatencyModel()
    model.note_speed(None)
    assert model.snapshot() == TYPICAL
    for token_s in (5e-3, 2e-3):
        model.note_speed(token_s)
        assert model.snapshot().token_s == pytest.approx(token_s)
    assert model.snapshot().pair_s / TYPICAL.pair_s == pytest.approx(2e-3 / TYPICAL.token_s)
    model.observe_ttft(prefill_work(1000), Ahead(), 9.0)
    learnt = model.snapshot()
    model.note_speed(1e-6)
    assert model.snapshot() == learnt
    model.check()


@pytest.mark.parametrize("truth", FLEET.values(), ids=FLEET)
def test_a_backend_without_observations_is_believed_to_be_like_similar_ones(truth: Latency) -> None:
    peers = Peers()
    seen, fresh = LatencyModel(peers), LatencyModel(peers)
    errors_of(seen, truth, 60)
    for batch, context_tokens in ((1, 100), (8, 20_000), (32, 90_000)) * 20:
        seen.observe_decode(batch, context_tokens, truth.tpot_s(batch, context_tokens))
    believed = fresh.snapshot()
    assert believed.ttft_s(5000, 2000) == pytest.approx(seen.snapshot().ttft_s(5000, 2000), rel=0.25)
    assert believed.tpot_s(8, 20_000) == pytest.approx(truth.tpot_s(8, 20_000), rel=0.25)
    fresh.check()


def test_its_reported_speed_is_off_as_that_of_the_others_was() -> None:
    peers = Peers()
    slow, fast = LatencyModel(peers), LatencyModel(peers)
    slow.note_speed(2e-3)
    snapshot = slow.snapshot()
    for uncached in (500, 2000, 8000) * 20:
        slow.observe_ttft(prefill_work(uncached), Ahead(), 3 * snapshot.ttft_s(uncached))
    fast.note_speed(1e-3)
    assert fast.snapshot().ttft_s(2000) == pytest.approx(1.5 * snapshot.ttft_s(2000), rel=0.1)
    assert LatencyModel().snapshot() == TYPICAL


def test_each_of_them_has_its_own_pace() -> None:
    peers, rng = Peers(), random.Random(6)
    truth = FLEET["8B on an H200"]
    paces = {"the slow one": 4.0, "the usual one": 1.0, "its twin": 1.0}
    models = {name: LatencyModel(peers) for name in paces}
    for _ in range(60):
        for name, model in models.items():
            tokens = math.exp(rng.uniform(5, 11))
            model.observe_ttft(prefill_work(tokens), Ahead(), paces[name] * truth.ttft_s(tokens))
    for name, model in models.items():
        for tokens in (1000, 50_000):
            assert model.snapshot().ttft_s(tokens) == pytest.approx(paces[name] * truth.ttft_s(tokens), rel=0.1), name
        model.check()


def test_a_backend_that_is_no_longer_measured_is_less_and_less_surely_slow() -> None:
    peers, truth = Peers(), FLEET["8B on an H200"]
    paused, *others = models = [LatencyModel(peers) for _ in range(3)]

    def answer(model: LatencyModel, times: float = 1.0) -> None:
        for tokens in (500, 5000):
            model.observe_ttft(prefill_work(tokens), Ahead(), times * truth.ttft_s(tokens))
            model.observe_decode(4, tokens, times * truth.tpot_s(4, tokens))

    for model in models * 5:
        answer(model)
    assert paused.doubt == pytest.approx((1.0, 1.0), rel=0.1)
    for _ in range(6):
        answer(paused, times=20.0)
    slow, surely = paused.snapshot(), paused.doubt
    assert slow.ttft_s(5000) > 3 * truth.ttft_s(5000)
    assert max(surely) < 1.0, "a few measurements may be a hiccup"
    for number in range(60):
        for other in others:
            answer(other)
        before, surely = surely, paused.doubt
        assert surely[0] < 1.001 * before[0], number
    assert paused.snapshot().ttft_s(5000) > 1.3 * truth.ttft_s(5000), "the estimate itself stays"
    assert surely[0] * paused.snapshot().ttft_s(5000) == pytest.approx(truth.ttft_s(5000), rel=0.25)
    assert surely[1] * paused.snapshot().tpot_s(4, 5000) == pytest.approx(truth.tpot_s(4, 5000), rel=0.25)


def test_a_backend_that_is_slow_each_time_is_tried_ever_less_often() -> None:
    peers, truth = Peers(), FLEET["8B on an H200"]
    slow, fast = LatencyModel(peers), LatencyModel(peers)

    def answers_until_tried() -> int:
        for number in range(1, 2000):
            fast.observe_ttft(prefill_work(5000), Ahead(), truth.ttft_s(5000))
            if slow.doubt[0] * slow.snapshot().ttft_s(5000) < 1.2 * fast.snapshot().ttft_s(5000):
                return number
        raise AssertionError("it is never tried again")

    between = []
    for _ in range(12):
        slow.observe_ttft(prefill_work(5000), Ahead(), 3 * truth.ttft_s(5000))
        between.append(answers_until_tried())
    assert between[-1] > 2 * between[1] > 10, between
    slow.check()


def test_twins_are_taken_to_be_equally_fast_though_each_sees_other_noise() -> None:
    peers, rng, truth = Peers(), random.Random(7), FLEET["8B on an H200"]
    twins = [LatencyModel(peers) for _ in range(8)]
    for _ in range(40):
        for twin in twins:
            tokens = math.exp(rng.uniform(5, 11))
            seen_s = truth.ttft_s(tokens) * math.exp(rng.gauss(0, 0.3))
            twin.observe_ttft(prefill_work(tokens), Ahead(), seen_s)
    believed = [twin.snapshot().ttft_s(5000) for twin in twins]
    assert max(believed) < 1.5 * min(believed)


def test_however_long_one_does_all_the_work_others_are_believed_to_be_like_it() -> None:
    peers, rng, truth = Peers(), random.Random(0), FLEET["8B on an H200"]
    busy, idle = LatencyModel(peers), LatencyModel(peers)
    for number in range(6000):
        tokens = rng.choice((30, 500, 4000, 30_000))
        seen_s = truth.ttft_s(tokens) * math.exp(rng.gauss(0, NOISE)) * (10 if rng.random() < 0.03 else 1)
        (idle if number < 40 and number % 2 else busy).observe_ttft(prefill_work(tokens), Ahead(), seen_s)
    for other in (idle, LatencyModel(peers)):
        assert other.snapshot().ttft_s(4000) == pytest.approx(truth.ttft_s(4000), rel=0.2)


def test_prompts_that_do_not_wait_for_each_other_teach_that_the_queue_is_short() -> None:
    model = LatencyModel()
    for uncached in (500, 2000, 8000) * 20:
        model.observe_ttft(prefill_work(uncached), behind(50_000, uncached), TYPICAL.ttft_s(uncached))
    assert model.snapshot().queue_s(behind(50_000, 1000)) < 0.2 * TYPICAL.queue_s(behind(50_000, 1000))


@pytest.mark.parametrize(
    ("name", "waits_s", "convoy"),
    [
        ("one after the other", lambda work, ahead: TYPICAL.work_s(ahead.alike) + TYPICAL.work_s(ahead.beyond), 1.0),
        ("side by side", lambda work, ahead: TYPICAL.work_s(ahead.alike), 0.0),
    ],
)
def test_it_is_learnt_whether_short_prompts_wait_for_long_ones(
    name: str, waits_s: Callable[[Work, Ahead], float], convoy: float
) -> None:
    model, rng = LatencyModel(), random.Random(4)
    for _ in range(200):
        own, other = (math.exp(rng.uniform(5, 10)) for _ in range(2))
        work, ahead = prefill_work(own), behind(other, own)
        model.observe_ttft(work, ahead, TYPICAL.ttft_s(own, queue_s=waits_s(work, ahead)))
    learnt = model.snapshot()
    assert learnt.queue == pytest.approx(1.0, abs=0.15), name
    assert learnt.convoy == pytest.approx(convoy, abs=0.15), name


def test_the_error_of_predictions_is_tracked_with_its_sign() -> None:
    model = LatencyModel()
    for _ in range(100):
        model.judge(predicted_s=0.5, seen_s=1.0)
    assert (model.error, model.bias) == (pytest.approx(0.5, rel=0.01), pytest.approx(-0.5, rel=0.01))
    model.judge(predicted_s=1e9, seen_s=1e-9)
    assert model.error < 2.0
    model.judge(predicted_s=1.0, seen_s=0.0)
    assert model.error < 2.0


def test_the_same_snapshot_is_given_until_something_is_learnt() -> None:
    model = LatencyModel()
    assert model.snapshot() is model.snapshot()
    before = model.snapshot()
    model.observe_decode(1, 100, 0.5)
    assert model.snapshot() != before


def test_prefill_is_summed_over_the_positions_that_each_token_attends_to() -> None:
    assert prefill_work(10, 100) == Work(10, 10 * 105)
    whole, first, rest = prefill_work(30), prefill_work(10), prefill_work(20, 10)
    assert (whole.tokens, whole.pairs) == (first.tokens + rest.tokens, first.pairs + rest.pairs)
    assert Latency(0, 1, 1).work_s(whole) == Latency(0, 1, 1).prefill_s(30)


ANY_DURATION = st.one_of(
    st.floats(allow_nan=True, allow_infinity=True),
    st.sampled_from([0.0, -1.0, 5e-324, 1e-12, 1e300, math.inf, math.nan]),
    st.floats(1e-4, 100),
)
ANY_TOKENS = st.floats(0, 1e7)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([TYPICAL, *PRIORS.values()]),
    st.lists(st.tuples(ANY_TOKENS, ANY_TOKENS, ANY_TOKENS, ANY_DURATION, ANY_DURATION), max_size=60),
)
def test_whatever_is_seen_coefficients_stay_positive_numbers_within_their_bounds(
    prior: Latency, seen: list[tuple[float, float, float, float, float]]
) -> None:
    model = LatencyModel(Peers(prior))
    for uncached, cached, ahead, ttft_s, step_s in seen:
        model.note_speed(ttft_s)
        model.observe_ttft(prefill_work(uncached, cached), Ahead(prefill_work(ahead), prefill_work(cached)), ttft_s)
        model.observe_decode(1.0 + ahead / 1000, cached, step_s)
        work, batch = prefill_work(uncached, cached), 1.0 + ahead / 1000
        model.observe_whole(work, Ahead(), step_s, steps=uncached, batch=batch, context_tokens=cached)
        model.judge(step_s, ttft_s)
        model.check()
    now = model.snapshot()
    for value, guess in zip(astuple(now), astuple(prior), strict=True):
        # what all have in common may be a thousand times the guess, and one of them a thousand times that
        assert guess / 1.01e6 <= value <= guess * 1.01e6
    assert 0.0 <= now.ttft_s(1000, 1000, queue_s=now.queue_s(Ahead(Work(10, 10), Work(10, 10)))) < math.inf
    assert math.isfinite(model.error)
    assert math.isfinite(model.bias)


def whole_answers(
    model: LatencyModel, truth: Latency, count: int, *, seed: int = 0, streamed: float = 0.0
) -> tuple[list[float], list[float]]:
    """Relative errors, of first tokens and of steps, of predictions made before each of `count` answers of 8 to 512
    tokens was seen; a share of them was `streamed`, of the others only the whole time was seen.
    """
    rng, of_first, of_steps = random.Random(seed), list[float](), list[float]()
    for (uncached, cached, ahead), _ in zip(prompts(rng, longest=20_000), range(count), strict=False):
        steps, batch = math.exp(rng.uniform(math.log(8), math.log(512))), rng.randint(1, 32)
        context_tokens = batch * rng.choice([500.0, 4000.0])
        ttft_s = truth.ttft_s(uncached, cached, queue_s=truth.queue_s(ahead)) * math.exp(rng.gauss(0, NOISE))
        step_s = truth.tpot_s(batch, context_tokens) * math.exp(rng.gauss(0, NOISE))
        now, work = model.snapshot(), prefill_work(uncached, cached)
        of_first.append(abs(now.ttft_s(uncached, cached, queue_s=now.queue_s(ahead)) - ttft_s) / ttft_s)
        of_steps.append(abs(now.tpot_s(batch, context_tokens) - step_s) / step_s)
        if rng.random() < streamed:
            model.observe_ttft(work, ahead, ttft_s)
            model.observe_decode(batch, context_tokens, step_s)
        else:
            model.observe_whole(
                work, ahead, ttft_s + steps * step_s, steps=steps, batch=batch, context_tokens=context_tokens
            )
        model.check()
    return of_first, of_steps


@pytest.mark.parametrize("truth", FLEET.values(), ids=FLEET)
def test_answers_of_which_only_the_whole_time_is_seen_teach_first_tokens_and_steps(truth: Latency) -> None:
    of_first, of_steps = whole_answers(LatencyModel(), truth, 300)
    for errors in (of_first, of_steps):
        assert mean(errors[40:80]) < 0.5
        assert mean(errors[150:]) < 1.5 * NOISE


@pytest.mark.parametrize("truth", FLEET.values(), ids=FLEET)
def test_whole_answers_among_streams_make_nothing_worse(truth: Latency) -> None:
    alone, mixed = (whole_answers(LatencyModel(), truth, 400, streamed=share) for share in (1.0, 0.2))
    for errors, others in zip(mixed, alone, strict=True):
        assert mean(errors[150:]) < 1.15 * mean(others[150:])


def test_one_that_is_known_from_streams_stays_known_however_many_whole_answers_follow() -> None:
    truth, model = FLEET["8B on an H200"], LatencyModel()
    whole_answers(model, truth, 200, streamed=1.0)
    for _ in range(2000):
        # always alike, and the prompt is a thousandth of their time: they say nothing of prompts
        seconds = truth.ttft_s(10) + 5000 * truth.tpot_s(4, 2000)
        model.observe_whole(prefill_work(10), Ahead(), seconds, steps=5000, batch=4, context_tokens=2000)
    assert model.snapshot().ttft_s(5000) == pytest.approx(truth.ttft_s(5000), rel=0.15)
    model.check()


@pytest.mark.parametrize("factor", [3.0, 1 / 3])
def test_a_backend_that_becomes_slower_or_faster_is_followed_by_whole_answers_too(factor: float) -> None:
    truth, model = FLEET["8B on an H200"], LatencyModel()
    whole_answers(model, truth, 200)
    costs = ("fixed_s", "token_s", "pair_s", "step_s", "sequence_s", "context_s")
    changed = replace(truth, **{name: factor * getattr(truth, name) for name in costs})
    of_first, of_steps = whole_answers(model, changed, 80, seed=1)
    for errors in (of_first, of_steps):
        assert mean(errors[30:]) < 3 * NOISE


def test_a_whole_answer_without_steps_is_a_first_token() -> None:
    first, second = LatencyModel(), LatencyModel()
    first.observe_ttft(prefill_work(500), Ahead(), 3.0)
    second.observe_whole(prefill_work(500), Ahead(), 3.0, steps=0.0, batch=1.0, context_tokens=500)
    assert first.snapshot() == second.snapshot()


PROMPT = prefill_work(20_000)


def test_before_any_observation_a_slow_first_token_is_far_beyond_the_guess() -> None:
    guess_s = TYPICAL.prefill_s(20_000)
    assert LatencyModel().slow_ttft_s(PROMPT, Ahead()) > 100 * guess_s


def test_once_a_backend_is_known_a_slow_first_token_is_near_the_usual_one() -> None:
    truth, model = FLEET["a CPU"], LatencyModel()
    for uncached, _, _ in (prompt for prompt, _ in zip(prompts(random.Random(3)), range(100), strict=False)):
        usual_s = truth.prefill_s(uncached)
        model.judge(model.snapshot().prefill_s(uncached), usual_s)
        model.observe_ttft(prefill_work(uncached), Ahead(), usual_s)
    assert truth.prefill_s(20_000) <= model.slow_ttft_s(PROMPT, Ahead()) < 3 * truth.prefill_s(20_000)


def test_a_backend_that_its_peers_make_known_may_be_somewhat_slower() -> None:
    truth, peers = FLEET["8B on an H200"], Peers()
    known, new = LatencyModel(peers), LatencyModel(peers)
    for uncached, _, _ in (prompt for prompt, _ in zip(prompts(random.Random(3)), range(100), strict=False)):
        known.observe_ttft(prefill_work(uncached), Ahead(), truth.prefill_s(uncached))
    usual_s = truth.prefill_s(20_000)
    assert 2 * usual_s < new.slow_ttft_s(PROMPT, Ahead()) < 20 * usual_s


def test_predictions_that_are_often_far_off_make_slow_ones_longer() -> None:
    steady, erratic = LatencyModel(), LatencyModel()
    rng = random.Random(1)
    for _ in range(100):
        steady.judge(1.0, math.exp(rng.gauss(0, 0.1)))
        erratic.judge(1.0, math.exp(rng.gauss(0, 1.0)))
    assert erratic.slow_ttft_s(PROMPT, Ahead()) > 4 * steady.slow_ttft_s(PROMPT, Ahead())


def test_a_slow_step_is_longer_beside_more_sequences() -> None:
    model = LatencyModel()
    assert 0 < model.slow_step_s(1, 1000) < model.slow_step_s(100, 100_000)


def test_turnover_is_one_when_every_cache_was_computed_once() -> None:
    turnover = Turnover()
    for _ in range(4):
        turnover.computed(5_000, cache_tokens=20_000, caches=2)
        turnover.computed(10_000, cache_tokens=40_000, caches=2)
    assert turnover.at == pytest.approx(1.0)


def test_a_cache_of_unknown_size_is_taken_to_be_large() -> None:
    turnover = Turnover()
    turnover.computed(1_000, cache_tokens=None, caches=1)
    assert 0.0 < turnover.at < 0.01


def test_what_was_added_counts_half_after_its_half_life() -> None:
    fading = FadingSum(half_life=300.0)
    fading.add(1000, now=50.0)
    assert fading.at(50.0) == 1000
    assert fading.at(350.0) == pytest.approx(500)
    fading.add(100, now=350.0)
    assert fading.at(950.0) == pytest.approx(150)


def test_a_clock_that_goes_back_makes_nothing_larger() -> None:
    fading = FadingSum(half_life=300.0)
    fading.add(1000, now=500.0)
    assert fading.at(100.0) == 1000
    fading.add(1, now=100.0)
    assert fading.at(500.0) == 1001


@given(st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1e5))))
def test_a_fading_sum_is_never_negative_and_never_more_than_the_whole_sum(
    added: list[tuple[float, float]],
) -> None:
    fading, now = FadingSum(half_life=300.0), 0.0
    for amount, pause_s in added:
        now += pause_s
        fading.add(amount, now)
        assert 0.0 <= fading.at(now) <= sum(each for each, _ in added) * (1 + 1e-9)


def test_quantiles_are_unknown_after_too_few_values() -> None:
    slow = SlowTime()
    for _ in range(7):
        slow.observe(1.0)
        assert slow.p99 is None
    slow.observe(1.0)
    assert slow.p99 == pytest.approx(1.0)


@pytest.mark.parametrize("spread", [0.1, 0.5, 1.0])
def test_the_p99_is_above_nearly_all_values_and_not_far_above(spread: float) -> None:
    rng, slow, above, estimates = random.Random(1), SlowTime(), 0, []
    for number in range(2000):
        value = 0.2 * math.exp(rng.gauss(0, spread))
        if number >= 100:
            assert slow.p99 is not None
            above += value > slow.p99
            estimates.append(slow.p99)
        slow.observe(value)
    assert above / 1900 < 0.05
    exact = 0.2 * p99_factor(spread**2)
    assert exact / 2 < sorted(estimates)[950] < exact * 2


def test_the_p99_follows_a_backend_that_becomes_slower() -> None:
    slow = SlowTime()
    for _ in range(200):
        slow.observe(0.1)
    for _ in range(60):
        slow.observe(10.0)
    assert slow.p99 is not None
    assert slow.p99 > 9.0


@pytest.mark.parametrize(("share", "deviations"), [(0.5, 0.0), (0.9, 1.2816), (0.95, 1.6449), (0.99, 2.3263)])
def test_each_quantile_is_that_of_a_log_normal_quantity(share: float, deviations: float) -> None:
    rng, slow, estimates = random.Random(2), SlowTime(), []
    for number in range(2000):
        slow.observe(0.2 * math.exp(rng.gauss(0, 0.5)))
        if number >= 100:
            estimates.append(slow.quantile(share))
        elif number < 7:
            assert slow.quantile(share) is None
    median = sorted(filter(None, estimates))[950]
    assert median == pytest.approx(0.2 * math.exp(0.5 * deviations), rel=0.15)


def test_what_is_no_duration_is_ignored() -> None:
    slow = SlowTime()
    for value in (0.0, -1.0, math.inf, math.nan):
        for _ in range(10):
            slow.observe(value)
    assert slow.p99 is None


def test_while_few_come_all_are_taken() -> None:
    sample = ObservationSample(per_s=10.0, burst=5.0)
    assert all(sample.takes(100.0 + 0.1 * number) for number in range(100))


def test_of_many_at_once_a_burst_is_taken_and_then_a_number_a_second() -> None:
    sample = ObservationSample(per_s=10.0, burst=5.0)
    assert sum(sample.takes(100.0) for _ in range(50)) == 5
    assert sum(sample.takes(100.0 + 0.01 * number) for number in range(1, 201)) == 20


def test_a_clock_that_is_set_back_takes_nothing_away() -> None:
    sample = ObservationSample(per_s=10.0, burst=2.0)
    assert sample.takes(100.0)
    assert sample.takes(50.0)
    assert not sample.takes(50.0)
    assert sample.takes(50.1)


@given(st.lists(st.floats(0.0, 5.0), max_size=200), st.floats(1.0, 50.0), st.floats(1.0, 20.0))
def test_no_period_has_more_than_the_burst_and_its_share(waits: list[float], per_s: float, burst: float) -> None:
    sample, now, taken = ObservationSample(per_s=per_s, burst=burst), 0.0, []
    for wait in waits:
        now += wait
        if sample.takes(now):
            taken.append(now)
    for first, began in enumerate(taken):
        for last in range(first, len(taken)):
            assert last - first + 1 <= burst + (taken[last] - began) * per_s + 1e-6


def test_first_tokens_that_teach_no_coefficient_still_bound_a_slow_one_in_proportion_to_its_prompt() -> None:
    peers = Peers()
    seen, new = LatencyModel(peers), LatencyModel(peers)
    unknown_s = new.slow_ttft_s(PROMPT, Ahead())
    predicted_s = new.snapshot().ttft_s(20_000)
    for _ in range(20):
        seen.judge(predicted_s, 2 * predicted_s)
    assert new.slow_ttft_s(PROMPT, Ahead()) == pytest.approx(2 * predicted_s, rel=0.01)
    longer = prefill_work(200_000)
    assert new.slow_ttft_s(longer, Ahead()) == pytest.approx(2 * new.snapshot().ttft_s(200_000), rel=0.01)
    assert unknown_s > 50 * predicted_s


def test_the_time_that_a_first_token_was_waited_for_in_vain_says_nothing_of_the_peers() -> None:
    peers = Peers()
    hangs, new = LatencyModel(peers), LatencyModel(peers)
    before_s = new.slow_ttft_s(PROMPT, Ahead())
    for _ in range(20):
        hangs.judge(0.1, 60.0, has_come=False)
    assert new.slow_ttft_s(PROMPT, Ahead()) == before_s
    assert new.late_ttft_s(0.1, 0.95) is None
    assert hangs.late_ttft_s(0.1, 0.95) == pytest.approx(60.0)


def test_what_is_late_at_a_new_backend_is_what_is_late_at_its_peers() -> None:
    peers = Peers()
    seen, new = LatencyModel(peers), LatencyModel(peers)
    for _ in range(20):
        seen.judge(0.1, 0.3)
    assert new.late_ttft_s(0.2, 0.95) == pytest.approx(0.6)


def test_answers_in_one_piece_bound_those_of_a_new_backend_once_there_are_some() -> None:
    peers = Peers()
    seen, new = LatencyModel(peers), LatencyModel(peers)
    predicted_s = new.snapshot().ttft_s(20_000)
    assert new.slow_whole_s(PROMPT, Ahead()) is None
    for _ in range(20):
        seen.judge_whole(predicted_s, 30.0)
    assert new.slow_whole_s(PROMPT, Ahead()) == pytest.approx(30.0, rel=0.01)


def test_a_step_that_was_never_seen_is_no_slower_than_the_first_token_of_a_short_prompt() -> None:
    peers = Peers()
    seen, new = LatencyModel(peers), LatencyModel(peers)
    for _ in range(20):
        seen.judge(0.1, 0.1)
    assert new.slow_step_s(1, 100) == new.slow_ttft_s(prefill_work(1), Ahead())
