import random
from collections import defaultdict

import pytest

from policies.prefix import PrefixIndex


class NaiveIndex:
    """What PrefixIndex means, in dicts of sets."""

    def __init__(self) -> None:
        self.held: dict[str, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))

    def longest(self, keys: list[int]) -> dict[str, int]:
        depths = {}
        for backend, tiers in self.held.items():
            known = set().union(*tiers.values())
            depth = 0
            while depth < len(keys) and keys[depth] in known:
                depth += 1
            if depth:
                depths[backend] = depth
        return depths


@pytest.mark.parametrize(("stored", "depth"), [([1, 2, 3], 3), ([1, 3], 1), ([1, 2, 3, 4], 3)])
def test_only_the_unbroken_prefix_counts(stored: list[int], depth: int) -> None:
    index = PrefixIndex()
    index.store("a", stored)
    assert index.longest([1, 2, 3]) == {"a": depth}


def test_who_does_not_hold_the_first_block_holds_nothing() -> None:
    index = PrefixIndex()
    index.store("a", [2, 3])
    assert index.longest([1, 2, 3]) == {}
    assert index.longest([]) == {}


def test_each_backend_has_its_own_depth() -> None:
    index = PrefixIndex()
    for name, depth in [("a", 200), ("b", 1), ("c", 65), ("d", 64), ("e", 128)]:
        index.store(name, range(1000, 1000 + depth))
    assert index.longest(range(1000, 1150)) == {"a": 150, "b": 1, "c": 65, "d": 64, "e": 128}
    index.check()


def test_a_block_evicted_from_the_middle_ends_the_prefix_there() -> None:
    index = PrefixIndex()
    index.store("a", range(100))
    index.store("b", range(100))
    index.evict("a", [40])
    assert index.longest(range(100)) == {"a": 40, "b": 100}


def test_a_block_is_held_while_any_tier_has_it() -> None:
    index = PrefixIndex()
    index.store("a", [1, 2], "device")
    index.store("a", [2, 3], "host")
    index.evict("a", [2], "device")
    assert index.longest([1, 2, 3]) == {"a": 3}
    index.evict("a", [2], "host")
    assert index.longest([1, 2, 3]) == {"a": 1}


def test_a_cleared_backend_holds_nothing_and_can_start_again() -> None:
    index = PrefixIndex()
    index.store("a", [1, 2])
    index.store("b", [1, 2])
    index.clear("a")
    assert index.longest([1, 2]) == {"b": 2}
    index.store("a", [1])
    assert index.longest([1, 2]) == {"a": 1, "b": 2}
    index.check()


def test_a_forgotten_backend_is_never_named_again() -> None:
    index = PrefixIndex()
    index.store("a", [1, 2], "host")
    index.forget("a")
    index.forget("a")
    assert index.longest([1, 2]) == {}
    index.check()


def test_what_is_unknown_can_be_evicted_and_forgotten() -> None:
    index = PrefixIndex()
    index.evict("nobody", [1])
    index.evict("nobody", [1], "host")
    index.forget("nobody")
    assert len(index) == 0
    index.check()


def test_the_oldest_blocks_go_first_and_of_one_prompt_the_last() -> None:
    index = PrefixIndex(max_blocks=4)
    index.store("a", [1, 2])
    index.store("a", [3, 4])
    index.store("a", [1, 2])
    index.store("a", [5])
    assert index.longest([1, 2]) == {"a": 2}
    assert index.longest([3, 4]) == {"a": 1}
    index.check()


def test_one_prompt_larger_than_the_index_keeps_its_beginning() -> None:
    index = PrefixIndex(max_blocks=10)
    index.store("a", range(1000))
    assert index.longest(range(1000)) == {"a": 10}


def test_restarts_without_end_leave_no_trace() -> None:
    index = PrefixIndex()
    for life in range(1000):
        index.clear("a")
        index.store("a", [life])
        index.store("b", [1, 2])
        index.check()
    assert index.longest([1, 2]) == {"b": 2}
    assert len(index) < 70


def test_an_index_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        PrefixIndex(max_blocks=0)


def test_its_state_is_its_repr() -> None:
    index = PrefixIndex(max_blocks=9)
    index.store("a", [1, 2])
    assert repr(index) == "<PrefixIndex device 2; at most 9 blocks, 1 backends>"
    assert index.size_bytes() > 0


@pytest.mark.parametrize("seed", range(4))
def test_it_answers_as_the_naive_one_after_any_history(seed: int) -> None:
    rng, index, naive = random.Random(seed), PrefixIndex(), NaiveIndex()
    prompts = [[rng.getrandbits(64) for _ in range(rng.randrange(1, 150))] for _ in range(6)]
    # two that part in the middle
    prompts.append(prompts[0][: len(prompts[0]) // 2] + prompts[1])
    backends = [f"b{number}" for number in range(7)]
    for step in range(2500):
        backend, keys, tier = rng.choice(backends), rng.choice(prompts), rng.choice(["device", "device", "host"])
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
    rng, index, naive = random.Random(seed), PrefixIndex(max_blocks=120), NaiveIndex()
    prompts = [[rng.getrandbits(64) for _ in range(50)] for _ in range(6)]
    for _ in range(1000):
        backend, keys = f"b{rng.randrange(4)}", rng.choice(prompts)
        tier = rng.choice(["device", "host"])
        index.store(backend, keys[: rng.randrange(51)], tier)
        naive.held[backend][tier] |= set(keys)
        index.check()
        truth = naive.longest(keys)
        assert all(depth <= truth[name] for name, depth in index.longest(keys).items())
