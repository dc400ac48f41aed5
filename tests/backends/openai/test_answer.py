from __future__ import annotations

from typing import Any

import pytest

from backends.openai.answer import deltas_of, usage_of
from policies.nouns import Usage


@pytest.mark.parametrize(
    "reported",
    [
        {"prompt_tokens_details": {"cached_tokens": 4}},
        # DeepSeek, and servers that follow it
        {"prompt_cache_hit_tokens": 4, "prompt_cache_miss_tokens": 3},
        # Moonshot
        {"cached_tokens": 4},
        {"prompt_tokens_details": {"cached_tokens": 4}, "prompt_cache_hit_tokens": 4},
        {"prompt_tokens_details": {"audio_tokens": 0}, "prompt_cache_hit_tokens": 4},
        {"prompt_tokens_details": None, "cached_tokens": 4},
    ],
)
def test_cached_tokens_are_understood_by_each_servers_name(reported: dict[str, Any]) -> None:
    assert usage_of({"prompt_tokens": 7, "completion_tokens": 2, **reported}) == Usage(7, 2, 4)


@pytest.mark.parametrize(
    ("ending", "stop"),
    [({"stop_reason": "END"}, "END"), ({"matched_stop": "END"}, "END"), ({"matched_stop": 151645}, None), ({}, None)],
)
def test_vllm_and_sglang_report_the_stop_that_ended_a_choice(ending: dict[str, Any], stop: str | None) -> None:
    choice = {"index": 0, "delta": {}, "finish_reason": "stop", **ending}
    assert [delta.stop for delta in deltas_of({"choices": [choice]})] == [stop]


@pytest.mark.parametrize(
    ("reported", "thought"),
    [
        ({}, None),
        ({"completion_tokens_details": {"reasoning_tokens": 5}}, 5),
        ({"completion_tokens_details": {"reasoning_tokens": 0}}, 0),
        ({"completion_tokens_details": None, "reasoning_tokens": 6}, 6),
    ],
)
def test_what_was_thought_is_counted_where_the_server_counts_it(reported: dict[str, Any], thought: int | None) -> None:
    assert usage_of({"prompt_tokens": 7, "completion_tokens": 9, **reported}) == Usage(7, 9, 0, thought)


def test_nonsense_of_thoughts_leaves_the_other_counts() -> None:
    usage = {"prompt_tokens": 7, "completion_tokens": 9, "completion_tokens_details": {"reasoning_tokens": -1}}
    assert usage_of(usage) == Usage(7, 9)
