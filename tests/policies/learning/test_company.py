"""What lines of batches cost other requests."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from policies.learning.company import Company


def after(effect: float, requests: int, *, blame: float = 0.0, spread: float = 0.1, seed: int = 1) -> Company:
    """Each line delays first tokens by `effect`; where there are no lines it is `blame` busier."""
    rng, company = random.Random(seed), Company()
    for number in range(requests):
        rests = number % 10 == 0
        load = rng.random()
        lines = 0 if rests else round(12 * load)
        tokens = rng.choice((300, 3000))
        seconds = tokens * 1e-5 * math.exp(effect * lines + blame * (1.0 - load) + rng.gauss(0.0, spread))
        company.add(seconds, prompt_tokens=tokens, lines=lines, rests=rests)
    return company


def test_at_first_it_is_a_guess() -> None:
    assert Company().slowdown == pytest.approx(0.01)
    assert Company().most_lines(0.05) == pytest.approx(4.9, abs=0.1)


@pytest.mark.parametrize("effect", [0.001, 0.03])
def test_the_effect_is_learned(effect: float) -> None:
    assert after(effect, 60_000).slowdown == pytest.approx(effect, rel=0.3, abs=0.005)


def test_a_limit_holds_though_times_vary_more_than_lines_matter() -> None:
    allowed = [after(0.005, 2000, spread=0.5, seed=seed).most_lines(0.05) for seed in range(20)]
    kept = sum(0.005 * lines <= 0.05 for lines in allowed)
    assert kept >= 17
    # and it does not forbid what is allowed
    assert statistics.median(allowed) > 3


def test_lines_are_not_credited_with_the_quiet_times_that_they_choose() -> None:
    # a plain comparison would find that lines make requests faster
    assert after(0.01, 60_000, blame=0.5).slowdown == pytest.approx(0.01, rel=0.4)


def test_lines_that_seem_to_help_have_a_bound() -> None:
    assert after(-0.05, 60_000).most_lines(0.05) == pytest.approx(488, rel=0.01)
