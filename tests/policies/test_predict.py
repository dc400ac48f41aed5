import pytest

from policies.learning.cost import Latency
from policies.predict import predicted_ttft_s, uncached_tokens
from tests.policies.builders import a_backend, a_request

SPEED = Latency(fixed_s=0.1, token_s=1e-3, pair_s=1e-6, step_s=0.01, sequence_s=0.002, context_s=1e-6)


def test_a_backend_that_holds_the_whole_prompt_still_computes_its_last_token() -> None:
    assert uncached_tokens(a_request(prompt_tokens=64), a_backend(held_tokens=64)) == 1


def test_where_nobody_knows_what_is_held_nothing_is() -> None:
    assert uncached_tokens(a_request(prompt_tokens=64), a_backend(held_tokens=None)) == 64


def test_the_first_token_comes_after_the_queue_and_the_prefill_of_what_is_not_held() -> None:
    backend = a_backend(latency=SPEED, queue_s=2.0, held_tokens=600)
    expected_s = 2.0 + 0.1 + 400 * 1e-3 + 400 * (600 + 200) * 1e-6
    assert predicted_ttft_s(a_request(prompt_tokens=1000), backend) == pytest.approx(expected_s)


def test_the_same_tokens_take_longer_behind_a_long_context() -> None:
    short = predicted_ttft_s(a_request(prompt_tokens=1000), a_backend(latency=SPEED))
    long = predicted_ttft_s(a_request(prompt_tokens=101_000), a_backend(latency=SPEED, held_tokens=100_000))
    assert long > 50 * short
