from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence

import pytest

from policies.prefix.index import PrefixIndex
from policies.prefix.match import Match
from policies.prefix.members import TIERS

SMALL = 16_384
"""Bytes of a table with a few hundred rows."""


class NaiveIndex:
    """A model of PrefixIndex, in dicts of sets."""

    def __init__(self) -> None:
        self.held: dict[str, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))

    def depths(self, backend: str, keys: Sequence[int]) -> list[int]:
        """Blocks without a gap on the device, there or on the host, and in any tier."""
        known: set[int] = set()
        depths = []
        for tier in TIERS:
            known |= self.held[backend][tier]
            depths.append(next((depth for depth, key in enumerate(keys) if key not in known), len(keys)))
        return depths

    def longest(self, keys: Sequence[int]) -> dict[str, Match]:
        matches = {}
        for backend in list(self.held):
            device, host, disk = self.depths(backend, keys)
            if disk:
                credit = device + 0.75 * (host - device) + 0.25 * (disk - host)
                matches[backend] = Match(disk, device, credit)
        return matches


def depths(index: PrefixIndex, keys: Sequence[int]) -> dict[str, int]:
    return {name: match.blocks for name, match in index.longest(keys).items()}


def a_prompt(rng: random.Random, blocks: int) -> list[int]:
    return [rng.getrandbits(64) for _ in range(blocks)]


@pytest.mark.parametrize("stored", [1, 255, 256, 1000, 5000])
def test_a_prefix_is_found_however_much_is_asked_and_however_it_came(stored: int) -> None:
    index, prompt = PrefixIndex(), a_prompt(random.Random(1), 5001)
    index.store("a", prompt[:stored])
    for asked in (1, stored, stored + 1):
        assert depths(index, prompt[:asked]) == {"a": min(asked, stored)}
    assert len(index) == stored
    index.check()


def test_a_backend_without_the_first_block_holds_nothing() -> None:
    index = PrefixIndex()
    index.store("a", [2, 3])
    assert index.longest([1, 2, 3]) == {}
    assert index.longest([]) == {}


def test_each_backend_has_its_own_depth() -> None:
    index, prompt = PrefixIndex(), a_prompt(random.Random(2), 150)
    wanted = {"a": 150, "b": 1, "c": 65, "d": 64, "e": 128}
    for name, depth in wanted.items():
        index.store(name, prompt[:depth])
    assert depths(index, prompt) == wanted
    assert depths(index, prompt[:64]) == {name: min(64, depth) for name, depth in wanted.items()}
    index.check()


def test_a_block_counts_by_the_fastest_tier_that_has_it() -> None:
    index, prompt = PrefixIndex(), a_prompt(random.Random(3), 100)
    index.store("a", prompt[:40])
    index.store("a", prompt[:80], "host")
    index.store("a", prompt, "disk")
    assert index.longest(prompt) == {"a": Match(blocks=100, device_blocks=40, credit=40 + 0.75 * 40 + 0.25 * 20)}
    index.evict("a", prompt[::-1])
    assert index.longest(prompt) == {"a": Match(blocks=100, device_blocks=0, credit=0.75 * 80 + 0.25 * 20)}
    index.evict("a", prompt, "disk")
    index.evict("a", prompt, "host")
    assert index.longest(prompt) == {}
    index.check()


def test_an_unknown_tier_is_the_slowest() -> None:
    index = PrefixIndex(weights={"device": 1.0, "host": 0.5, "disk": 0.125})
    index.store("a", [1, 2], "tape")
    assert index.longest([1, 2]) == {"a": Match(2, 0, 0.25)}


def test_a_backend_marked_as_having_holes_is_walked() -> None:
    index, prompt = PrefixIndex(), a_prompt(random.Random(4), 1500)
    for name in ("closed", "holes"):
        index.store(name, prompt)
    index.evict("closed", prompt[1400:])
    index.evict("holes", [prompt[700]])
    index.expect_holes("holes")
    assert depths(index, prompt) == {"closed": 1400, "holes": 700}
    index.store("holes", [prompt[700]])
    assert depths(index, prompt) == {"closed": 1400, "holes": 1500}


def test_a_broken_promise_never_names_a_last_block_that_is_not_held() -> None:
    index, prompt = PrefixIndex(), a_prompt(random.Random(5), 1000)
    index.store("a", prompt[:900])
    index.evict("a", [prompt[0]])
    assert index.longest(prompt) == {}
    index.store("a", [prompt[0]])
    index.evict("a", [prompt[899], prompt[500], prompt[3]])
    assert 0 < depths(index, prompt)["a"] <= 899


def test_each_match_has_its_trust_until_the_backend_starts_again() -> None:
    index = PrefixIndex()
    for name in ("a", "b"):
        index.store(name, [1, 2])
    index.trust("a", 0.5)
    matches = index.longest([1, 2])
    assert {name: (match.p_hit, match.expected_blocks) for name, match in matches.items()} == {
        "a": (0.5, 1.0),
        "b": (1.0, 2.0),
    }
    index.trust("b", 0.5)
    index.trust("b", 1.0)
    assert index.longest([1, 2])["b"].p_hit == 1.0
    index.clear("a")
    index.store("a", [1])
    assert index.longest([1])["a"].p_hit == 1.0
    with pytest.raises(ValueError, match="not a probability"):
        index.trust("a", 1.5)


def test_a_cleared_backend_holds_nothing_and_can_start_again() -> None:
    index = PrefixIndex()
    index.store("a", [1, 2])
    index.store("b", [1, 2])
    index.clear("a")
    assert depths(index, [1, 2]) == {"b": 2}
    index.store("a", [1])
    assert depths(index, [1, 2]) == {"a": 1, "b": 2}
    index.check()


def test_a_forgotten_backend_is_never_named_again() -> None:
    index = PrefixIndex()
    index.store("a", [1, 2], "host")
    index.forget("a")
    index.forget("a")
    assert index.longest([1, 2]) == {}
    assert len(index) == 0
    index.check()


def test_what_is_unknown_can_be_evicted_touched_and_forgotten() -> None:
    index = PrefixIndex()
    index.evict("nobody", [1])
    index.store("a", [1])
    index.evict("a", [2])
    index.evict("a", list(range(2, 100)), "host")
    index.touch([2, 3])
    index.forget("nobody")
    assert depths(index, [1]) == {"a": 1}
    assert len(index) == 1
    index.check()


def test_a_key_of_zero_is_a_key_like_others() -> None:
    index = PrefixIndex()
    index.store("a", [0, 5])
    assert depths(index, [0, 5]) == {"a": 2}
    index.evict("a", [0])
    assert index.longest([0, 5]) == {}


@pytest.mark.parametrize("blocks", [10, 3000])
def test_a_block_that_is_named_twice_counts_once(blocks: int) -> None:
    index, prompt = PrefixIndex(), a_prompt(random.Random(10), blocks)
    index.store("a", prompt + prompt)
    index.check()
    assert len(index) == blocks
    index.evict("a", prompt + prompt)
    index.check()
    assert len(index) == 0


def test_a_full_index_drops_the_oldest_prompts_and_their_ends_first() -> None:
    rng, index = random.Random(6), PrefixIndex(max_bytes=SMALL)
    prompts = [a_prompt(rng, 30) for _ in range(200)]
    for prompt in prompts:
        index.store("a", prompt)
        index.check()
    known = [depths(index, prompt).get("a", 0) for prompt in prompts]
    assert known[:150] == [0] * 150
    assert known[-10:] == [30] * 10


def test_what_is_touched_outlives_what_is_not() -> None:
    rng, index = random.Random(7), PrefixIndex(max_bytes=SMALL)
    popular, forgotten = a_prompt(rng, 60), a_prompt(rng, 60)
    for prompt in (popular, forgotten):
        index.store("a", prompt)
    for _ in range(100):
        index.touch(popular + a_prompt(rng, rng.choice([0, 300])))
        index.store("a", a_prompt(rng, 20))
    assert depths(index, popular) == {"a": 60}
    assert index.longest(forgotten) == {}


def test_one_prompt_larger_than_the_index_keeps_its_beginning() -> None:
    index, prompt = PrefixIndex(max_bytes=SMALL), a_prompt(random.Random(8), 5000)
    index.store("a", prompt)
    assert depths(index, prompt[:500])["a"] > 400
    index.check()


def test_restarts_without_end_leave_no_trace() -> None:
    index = PrefixIndex(max_bytes=SMALL)
    for life in range(3000):
        index.clear("a")
        index.store("a", [life + 10])
        index.store("b", [1, 2])
        if life % 100 == 0:
            index.check()
    assert depths(index, [1, 2]) == {"b": 2}
    assert len(index) == 3
    assert "3 blocks of 2 backends in 2 sets" in repr(index)


def test_where_holders_differ_without_end_a_block_remembers_its_newest_one() -> None:
    rng, index = random.Random(9), PrefixIndex(max_bytes=SMALL)
    blocks = list(range(1, 301))
    for _ in range(5000):
        index.store(f"b{rng.randrange(40)}", [rng.choice(blocks)])
    index.store("last", blocks)
    index.check()
    assert all("last" in index.longest([block]) for block in blocks)
    index.evict("last", blocks)
    index.check()


def test_an_index_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="holds nothing"):
        PrefixIndex(max_bytes=10)


@pytest.mark.parametrize(("seed", "longest", "steps"), [(0, 150, 1500), (1, 150, 1500), (2, 1200, 300), (3, 1200, 300)])
def test_it_answers_as_the_naive_one_after_any_closed_history(seed: int, longest: int, steps: int) -> None:
    """A closed history evicts a block only when nothing that the backend holds lies behind it."""
    rng, index, naive = random.Random(seed), PrefixIndex(max_bytes=2**22), NaiveIndex()
    prompts = [a_prompt(rng, rng.randrange(1, longest)) for _ in range(6)]
    backends = [f"b{number}" for number in range(7)]
    for step in range(steps):
        backend, keys, tier = (
            rng.choice(backends),
            rng.choice(prompts),
            rng.choice(["device", "device", "host", "disk"]),
        )
        own, event = naive.held[backend], rng.random()
        if event < 0.55:
            # what a slower tier gets, a faster one has the beginning of
            start = min(naive.depths(backend, keys)[TIERS.index(tier)], len(keys) - 1)
            stored = keys[start : start + rng.randrange(len(keys) + 1)]
            index.store(backend, stored, tier)
            own[tier] |= set(stored)
        elif event < 0.97:
            length = naive.depths(backend, keys)[2]
            lost = keys[rng.randrange(length + 1) :][::-1]
            for level in (
                TIERS if tier == "disk" else [tier] if tier == "device" and set(lost) <= own["disk"] else TIERS
            ):
                index.evict(backend, lost, level)
                own[level] -= set(lost)
        else:
            index.clear(backend) if rng.random() < 0.7 else index.forget(backend)
            naive.held.pop(backend, None)
        asked = rng.choice(prompts)
        assert index.longest(asked) == naive.longest(asked), f"seed {seed}, step {step}"
        if step % 50 == 0:
            index.check()
    index.check()


@pytest.mark.parametrize(("seed", "longest", "steps"), [(0, 150, 1500), (1, 150, 1500), (2, 1200, 300), (3, 1200, 300)])
def test_it_answers_as_the_naive_one_after_any_history_of_backends_with_holes(
    seed: int, longest: int, steps: int
) -> None:
    rng, index, naive = random.Random(seed), PrefixIndex(max_bytes=2**22), NaiveIndex()
    prompts = [a_prompt(rng, rng.randrange(1, longest)) for _ in range(6)]
    # two that part in the middle
    prompts.append(prompts[0][: len(prompts[0]) // 2] + prompts[1])
    backends = [f"b{number}" for number in range(7)]
    for step in range(steps):
        backend, keys, tier = rng.choice(backends), rng.choice(prompts), rng.choice(["device", "device", "host"])
        index.expect_holes(backend)
        event = rng.random()
        if event < 0.55:
            stored = keys[: rng.randrange(len(keys) + 1)]
            index.store(backend, stored, tier)
            naive.held[backend][tier] |= set(stored)
        elif event < 0.97:
            lost = rng.sample(keys, rng.randrange(min(4, len(keys)) + 1)) if rng.random() < 0.5 else keys[-5:]
            index.evict(backend, lost, tier)
            naive.held[backend][tier] -= set(lost)
        else:
            index.clear(backend) if rng.random() < 0.7 else index.forget(backend)
            naive.held.pop(backend, None)
        asked = rng.choice(prompts)
        assert index.longest(asked) == naive.longest(asked), f"seed {seed}, step {step}"
        if step % 50 == 0:
            index.check()
    index.check()


@pytest.mark.parametrize("seed", range(3))
def test_a_full_index_never_claims_more_than_the_naive_one(seed: int) -> None:
    rng, index, naive = random.Random(seed), PrefixIndex(max_bytes=SMALL), NaiveIndex()
    prompts = [a_prompt(rng, 100) for _ in range(12)] + [a_prompt(rng, 400)]
    for step in range(1000):
        backend, keys = f"b{rng.randrange(4)}", rng.choice(prompts)
        tier = rng.choice(["device", "host"])
        stored = keys[: rng.randrange(len(keys) + 1)]
        index.store(backend, stored, tier)
        naive.held[backend][tier] |= set(stored)
        if step % 20 == 0:
            index.check()
        truth = naive.longest(keys)
        assert all(match.blocks <= truth[name].blocks for name, match in index.longest(keys).items())
