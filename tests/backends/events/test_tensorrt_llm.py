from __future__ import annotations

import json
from typing import Any

import pytest

from backends.events.nouns import CacheEvent, Cleared, Removed, Stored, packed
from backends.events.tensorrt_llm import NumberedEvents, decode


def numbered(data: Any, **fields: Any) -> NumberedEvents:
    (event,) = decode(json.dumps([{"event_id": 5, "window_size": 64, "data": data, **fields}]).encode())
    return event


def events(data: Any) -> tuple[CacheEvent, ...]:
    return numbered(data).events


def a_block(*tokens: int, **fields: Any) -> dict[str, Any]:
    return {"block_hash": 1, "tokens": [{"token_id": token} for token in tokens], "cache_level": 0, **fields}


def test_an_engine_without_news_answers_in_two_ways() -> None:
    assert decode(b"[]") == decode(b"null") == []


def test_blocks_follow_one_another() -> None:
    first, second = events({"type": "stored", "parent_hash": 9, "blocks": [a_block(1, 2), a_block(3, block_hash=2)]})
    assert first == Stored((1,), 9, packed([1, 2]), 2, group=64, window=64)
    assert second == Stored((2,), 1, packed([3]), 1, group=64, window=64)


def test_hashes_may_be_text_and_salts_numbers() -> None:
    (event,) = events({"type": "stored", "blocks": [a_block(1, block_hash="5f", cache_salt_id=77, lora_id=4)]})
    assert isinstance(event, Stored)
    assert (event.hashes, event.salt, event.adapter) == (("5f",), "77", "lora_id:4")


def test_what_tokens_do_not_name_is_an_extra_key() -> None:
    (event,) = events({"type": "stored", "blocks": [a_block(1, mm_keys=[{"hash": "ab", "start_offset": 0}])]})
    assert isinstance(event, Stored)
    assert event.extra_keys == (('{"hash":"ab","start_offset":0}',),)


def test_a_block_that_moves_is_in_the_new_tier_before_it_leaves_the_old() -> None:
    moved = {"type": "updated", "block_hash": 1, "cache_level": {"new_value": 1, "old_value": 0}, "priority": None}
    assert events(moved) == (Stored((1,), None, b"", 0, "host", group=64, window=64), Removed((1,), "device", group=64))
    assert events({"type": "updated", "block_hash": 1, "priority": {"new_value": 1, "old_value": 0}}) == ()


def test_a_new_cache_is_an_empty_one() -> None:
    assert events({"type": "created", "num_blocks_per_cache_level": [10, 0]}) == (Cleared(),)


@pytest.mark.parametrize(
    ("data", "heard", "unknown", "malformed"),
    [
        ({"type": "stored", "blocks": "none"}, (), 0, 1),
        ({"type": "stored", "blocks": [a_block(-1)]}, (), 0, 1),
        ({"type": "stored", "blocks": [a_block(1, mm_keys=json.loads("[" * 129 + "]" * 129))]}, (), 0, 1),
        ({"type": "removed"}, (Cleared(),), 0, 1),
        ({"type": "updated"}, (Cleared(),), 0, 1),
        ({}, (Cleared(),), 0, 1),
        (7, (Cleared(),), 0, 1),
        ({"type": "compacted", "blocks": []}, (), 1, 0),
    ],
)
def test_an_event_that_cannot_be_read_claims_nothing(data: Any, heard: Any, unknown: int, malformed: int) -> None:
    assert numbered(data) == NumberedEvents(5, 0, heard, unknown, malformed)


def test_an_event_without_a_number_has_none() -> None:
    (event,) = decode(b'[{"data": {"type": "removed", "block_hashes": [1]}}]')
    assert (event.seq, event.malformed) == (None, 1)


def test_each_rank_counts_for_itself() -> None:
    assert numbered({"type": "removed", "block_hashes": [1]}, attention_dp_rank=3).rank == 3
