import pytest

from policies.prefix.match import Match, best, faded


def test_of_several_beliefs_the_one_that_expects_most_counts() -> None:
    exact = {"a": Match(10, 10, 10.0), "b": Match(4, 4, 4.0)}
    guessed = {"b": Match(20, 20, 20.0, 0.5), "c": Match(1, 1, 1.0, 0.1)}
    assert best(exact, guessed) == {"a": exact["a"], "b": guessed["b"], "c": guessed["c"]}


@pytest.mark.parametrize(("silent_s", "p"), [(0.0, 1.0), (2.0, 1.0), (62.0, 0.5), (122.0, 0.25)])
def test_trust_fades_with_silence(silent_s: float, p: float) -> None:
    assert faded(silent_s, fresh_s=2.0, half_life_s=60.0) == pytest.approx(p)
