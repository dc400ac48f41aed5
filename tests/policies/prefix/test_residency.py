from __future__ import annotations

import random
from collections import OrderedDict

import pytest

from policies.prefix.cached_hints import Hint, from_usage
from policies.prefix.residency import Residency, ResidencyRules


def a_prompt(blocks: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.getrandbits(64) for _ in range(blocks)]


class Engine:
    """A prefix cache of `capacity` blocks, least recently used out first, children before their parents."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.cached: OrderedDict[int, None] = OrderedDict()

    def serve(self, keys: list[int]) -> int:
        """Number of cached blocks of `keys`; afterwards all are cached, as far as they fit."""
        hits = next((depth for depth, key in enumerate(keys) if key not in self.cached), len(keys))
        for key in reversed(keys):
            self.cached[key] = None
            self.cached.move_to_end(key)
        while len(self.cached) > self.capacity:
            self.cached.popitem(last=False)
        return hits


def test_what_was_sent_is_believed_to_be_there() -> None:
    residency, prompt = Residency(), a_prompt(100)
    guess = residency.sent("a", prompt, 0.0)
    assert (guess.known, guess.distances) == (0, ())
    (match,) = residency.longest(prompt[:80] + a_prompt(20, 1), 1.0).values()
    assert match.blocks == 80
    assert match.p_hit > 0.99
    assert residency.longest(a_prompt(10, 2), 1.0) == {}
    assert residency.longest([], 1.0) == {}
    residency.check()


@pytest.mark.parametrize(("shared", "found"), [(255, 255), (256, 256), (271, 256), (272, 272), (3000, 2992)])
def test_of_long_prompts_few_blocks_are_recorded_and_the_known_length_is_rounded_down(shared: int, found: int) -> None:
    residency, prompt = Residency(), a_prompt(4096)
    residency.sent("a", prompt, 0.0)
    other = prompt[:shared] + a_prompt(500, 1)
    assert residency.longest(other, 0.0)["a"].blocks == residency.known("a", other) == found
    guess = residency.sent("a", other, 0.0)
    assert (guess.blocks, guess.known) == (shared + 500, found)
    assert {depth for depth, _ in guess.distances} <= {*range(256), *range(271, 4096, 16)}
    residency.check()


@pytest.mark.parametrize("blocks", [200, 2000])
def test_a_long_prompt_ages_by_its_blocks_and_not_by_its_records(blocks: int) -> None:
    residency, first = Residency(), a_prompt(10, 1)
    residency.sent("a", first, 0.0)
    residency.sent("a", a_prompt(blocks, 2), 0.0)
    ((_, since), *_) = residency.sent("a", first, 0.0).distances
    assert since == blocks


def test_a_prompt_of_a_megabyte_takes_few_hundred_rows() -> None:
    residency = Residency()
    residency.sent("a", a_prompt(4096), 0.0)
    picture = residency.picture("a", 10_000, 0.0)
    assert picture is not None
    assert len(picture) == 256 + 240


def test_belief_fades_with_what_came_after_and_with_idle_time() -> None:
    residency, prompt = Residency(ResidencyRules(first_blocks=1000, fresh_s=10, half_life_s=60)), a_prompt(100)
    residency.sent("a", prompt, 0.0)
    chances = [residency.longest(prompt, 0.0)["a"].p_hit]
    for seed in range(1, 4):
        residency.sent("a", a_prompt(500, seed), 0.0)
        chances.append(residency.longest(prompt, 0.0)["a"].p_hit)
    assert chances == sorted(chances, reverse=True)
    assert chances[0] > 0.99
    assert 0.1 < chances[3] < 0.3
    residency.sent("a", prompt, 0.0)
    assert residency.longest(prompt, 70.0)["a"].p_hit == pytest.approx(0.5, abs=0.01)
    assert residency.longest(prompt, 10_000.0) == {}


@pytest.mark.parametrize("capacity", [400, 3000, 20_000])
def test_it_learns_the_capacity_of_an_engine_and_estimates_the_probability_of_a_hit(capacity: int) -> None:
    rng, engine = random.Random(capacity), Engine(capacity)
    residency = Residency(ResidencyRules(first_blocks=3000))
    documents = [a_prompt(rng.randrange(20, 120), seed) for seed in range(max(20, capacity // 25))]
    wrong = wrong_if_sure = 0.0
    for step in range(3000):
        document = documents[int(len(documents) * rng.random() ** 2)]
        prompt = document + a_prompt(3, 10_000 + step)
        match = residency.longest(prompt, 0.0).get("a")
        guess = residency.sent("a", prompt, 0.0)
        cached = engine.serve(prompt)
        if step > 1000 and guess.known:
            share = cached / guess.known
            wrong += ((match.p_hit if match else 0.0) - share) ** 2
            wrong_if_sure += (1.0 - share) ** 2
        residency.observe(guess, from_usage(cached * 64, len(prompt) * 64))
    learnt = residency.capacity_blocks("a")
    assert learnt is not None
    assert capacity / 2.5 < learnt < capacity * 2.5
    assert wrong < 0.5 * wrong_if_sure
    residency.check()


def test_two_unexpected_misses_mean_a_restart() -> None:
    residency, prompts = Residency(), [a_prompt(50, seed) for seed in range(4)]
    for prompt in prompts:
        residency.sent("a", prompt, 0.0)
    before = residency.capacity_blocks("a")
    for prompt in prompts[:2]:
        residency.observe(residency.sent("a", prompt, 0.0), Hint(0.0, 1.0))
    assert residency.longest(prompts[3], 0.0) == {}
    assert before is not None
    assert (residency.capacity_blocks("a") or 0) > before / 3


def test_unsure_hints_never_make_a_restart() -> None:
    residency, prompt = Residency(), a_prompt(50)
    residency.sent("a", prompt, 0.0)
    for _ in range(5):
        residency.observe(residency.sent("a", prompt, 0.0), Hint(0.0, 0.25))
    assert residency.longest(prompt, 0.0)["a"].blocks == 50


def test_a_block_less_than_expected_is_no_miss() -> None:
    residency, prompt = Residency(), a_prompt(50)
    residency.sent("a", prompt, 0.0)
    before = residency.capacity_blocks("a")
    residency.observe(residency.sent("a", prompt, 0.0), Hint(49 / 50, 1.0))
    assert residency.capacity_blocks("a") == pytest.approx(before, rel=0.01)


def test_answers_take_room_too() -> None:
    residency, prompt = Residency(ResidencyRules(first_blocks=100)), a_prompt(10)
    residency.sent("a", prompt, 0.0)
    sure = residency.longest(prompt, 0.0)["a"].p_hit
    residency.answered("a", 100)
    assert residency.longest(prompt, 0.0)["a"].p_hit < sure
    residency.answered("nobody", 1)


def test_a_backend_that_left_is_forgotten_and_hints_about_it_are_ignored() -> None:
    residency, prompt = Residency(), a_prompt(10)
    guess = residency.sent("a", prompt, 0.0)
    assert "a" in repr(residency)
    residency.forget("a")
    residency.observe(guess, Hint(1.0, 1.0))
    residency.restarted("a")
    assert residency.longest(prompt, 0.0) == {}
    assert residency.capacity_blocks("a") is None
    assert residency.size_bytes() == 0


def test_it_stays_within_its_bytes() -> None:
    residency = Residency(ResidencyRules(max_bytes=2**15))
    for seed in range(100):
        residency.sent("a", a_prompt(300, seed), float(seed))
    residency.check()
    assert residency.longest(a_prompt(300, 99), 100.0)["a"].blocks > 200


def a_taught(seed: int, prompts: int = 60) -> tuple[Residency, list[list[int]]]:
    """A residency that learnt from a cache of 900 blocks, and the prompts that were sent there."""
    rng, engine, residency = random.Random(seed), Engine(900), Residency()
    documents = [a_prompt(60, 100 + number) for number in range(6)]
    asked = [rng.choice(documents)[: rng.randint(1, 60)] + a_prompt(rng.randint(1, 10), at) for at in range(prompts)]
    for at, keys in enumerate(asked):
        guess = residency.sent("a", keys, float(at))
        residency.observe(guess, from_usage(64 * engine.serve(keys), 64 * len(keys)))
    return residency, asked


@pytest.mark.parametrize("most_keys", [64, 1024])
@pytest.mark.parametrize("seed", range(4))
def test_a_router_that_takes_over_a_snapshot_in_parts_believes_and_learns_the_same(seed: int, most_keys: int) -> None:
    residency, asked = a_taught(seed)
    picture, other = residency.picture("a", 100_000, 60.0), Residency()
    assert picture is not None
    for part in picture.parts(most_keys):
        other.take_over(part, 60.0)
    for keys in asked:
        assert other.longest(keys, 60.0) == residency.longest(keys, 60.0)
    for each in (residency, other):
        each.observe(each.sent("a", asked[0] + a_prompt(40, 999), 61.0), Hint(0.5, 1.0))
        each.check()
    assert other.longest(asked[0], 62.0) == residency.longest(asked[0], 62.0)


def test_of_a_picture_that_is_too_large_the_newest_blocks_are_kept() -> None:
    residency, _ = a_taught(1)
    newest = a_prompt(50, 7777)
    residency.sent("a", newest, 60.0)
    picture, other = residency.picture("a", 50, 60.0), Residency()
    assert picture is not None
    assert sorted(picture.keys.tolist()) == sorted(newest)
    other.take_over(picture, 60.0)
    assert other.longest(newest, 60.0)["a"].blocks == 50
    assert residency.picture("b", 50, 60.0) is None


def test_what_is_known_better_here_stays_when_a_picture_is_taken_over() -> None:
    here, there = Residency(), Residency()
    shared, own = a_prompt(10, 1), a_prompt(10, 2)
    there.sent("a", shared, 0.0)
    there.sent("a", a_prompt(5000, 3), 1.0)
    here.sent("a", shared, 2.0)
    here.sent("a", own, 2.0)
    picture = there.picture("a", 100_000, 2.0)
    assert picture is not None
    here.take_over(picture, 2.0)
    assert here.longest(own, 2.0)["a"].p_hit > 0.99
    assert here.longest(shared, 2.0)["a"].p_hit > 0.99
    assert there.longest(shared, 2.0)["a"].p_hit < 0.5
    here.check()
