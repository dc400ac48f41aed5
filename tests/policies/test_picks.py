import random
from collections import Counter

from policies.picks import best, best_of

SCORED = [("a", 0.5), ("b", 0.9), ("c", 0.9), ("d", 0.1)]


def test_the_best_wins_and_equals_share() -> None:
    rng = random.Random(1)
    picked = Counter(best()(SCORED, rng) for _ in range(1000))
    assert set(picked) == {"b", "c"}
    assert abs(picked["b"] - 500) < 100


def test_best_of_two_never_takes_the_worst_of_many_and_takes_the_second_best_at_times() -> None:
    rng = random.Random(1)
    picked = Counter(best_of()([("a", 0.5), ("b", 0.9), ("d", 0.1)], rng) for _ in range(1000))
    assert set(picked) == {"a", "b"}
    assert picked["b"] > picked["a"] > 200


def test_a_sample_larger_than_the_field_is_the_field() -> None:
    assert best_of(sample=9)([("a", 0.5)], random.Random(1)) == "a"
