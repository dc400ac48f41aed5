import pytest

from policies.prefix.cached_hints import Hint, from_evaluated, from_ttft, from_usage


def test_usage_is_exact() -> None:
    assert from_usage(640, 1000) == Hint(0.64, 1.0)
    assert from_usage(0, 0) == Hint(0.0, 1.0)


@pytest.mark.parametrize(
    ("evaluated", "hint"), [(None, Hint(1.0, 0.5)), (100, Hint(0.9, 0.8)), (1000, None), (950, None)]
)
def test_a_count_of_evaluated_tokens_speaks_only_when_it_is_small_or_absent(
    evaluated: int | None, hint: Hint | None
) -> None:
    assert from_evaluated(evaluated, 1000) == hint


@pytest.mark.parametrize(("ttft_s", "share"), [(0.1, 0.8), (0.35, 0.8), (1.0, None), (1.8, 0.0), (9.0, 0.0)])
def test_a_ttft_speaks_only_when_it_is_near_one_of_the_predictions(ttft_s: float, share: float | None) -> None:
    hint = from_ttft(ttft_s, cold_s=2.0, warm_s=0.2, warm_share=0.8)
    assert (None if hint is None else hint.share) == share


def test_predictions_that_cannot_be_distinguished_give_no_hint() -> None:
    assert from_ttft(0.1, cold_s=0.25, warm_s=0.2, warm_share=0.2) is None
