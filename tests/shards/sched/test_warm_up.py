from __future__ import annotations

import pytest

from shards.kv.keys import BLOCK_TOKENS
from shards.sched.warm_up import NEW_TOKENS, warm_up_prompts


def test_prompts_of_several_lengths_run_before_the_first_request() -> None:
    assert warm_up_prompts(100_000) == (BLOCK_TOKENS, 4 * BLOCK_TOKENS, 2 * BLOCK_TOKENS + 1, BLOCK_TOKENS)


@pytest.mark.parametrize("context_tokens", [16, 64, 65, 100, 255, 260])
def test_each_of_them_fits_the_context_with_its_answer(context_tokens: int) -> None:
    longest = context_tokens - NEW_TOKENS
    assert warm_up_prompts(context_tokens) == tuple(min(length, longest) for length in warm_up_prompts(100_000))
