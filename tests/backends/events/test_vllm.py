from __future__ import annotations

from typing import Any

import msgspec
import pytest

from backends.events.nouns import MalformedEvents, Removed, Stored
from backends.events.vllm import decode


def stored(**fields: Any) -> Stored:
    """The one event that a map with `fields` is read as."""
    whole = {"type": "BlockStored", "block_hashes": [1, 2], "token_ids": [1, 2, 3, 4], "block_size": 2, **fields}
    (event,) = decode(msgspec.msgpack.encode([1.0, [whole], 0])).events
    assert isinstance(event, Stored)
    return event


def test_the_salt_is_the_last_text_of_a_prompts_first_block() -> None:
    event = stored(extra_keys=[["acme"], None])
    assert (event.salt, event.extra_keys) == ("acme", ())
    event = stored(extra_keys=[[["picture", 3], "acme"], [["picture", -1]]])
    assert (event.salt, event.extra_keys) == ("acme", (('["picture",3]',), ('["picture",-1]',)))


def test_later_blocks_have_no_salt_of_their_own() -> None:
    event = stored(parent_block_hash=9, extra_keys=[["picture"], None])
    assert (event.salt, event.extra_keys) == (None, (("picture",), ()))


def test_the_adapter_is_no_extra_key() -> None:
    event = stored(lora_name="chat", lora_id=3, extra_keys=[["chat", "acme"], ["chat"]])
    assert (event.adapter, event.salt, event.extra_keys) == ("chat", "acme", ())


def test_an_adapter_without_a_name_matches_no_prompt_by_accident() -> None:
    assert stored(lora_id=3).adapter == "lora_id:3"


def test_the_hash_of_prompt_embeddings_is_an_extra_key() -> None:
    assert stored(extra_keys=[["acme", b"\x01\x02"], [b"\x03"]]).extra_keys == (("0102",), ("03",))


def nested(depth: int) -> bytes:
    """A batch with a block; its extra key has `levels` levels."""
    key: Any = msgspec.Raw(b"\x91" * depth + b"\xc0")
    fields = {"type": "BlockStored", "block_hashes": [1], "token_ids": [1], "block_size": 1, "extra_keys": [[key]]}
    return msgspec.msgpack.encode([1.0, [fields], 0])


@pytest.mark.parametrize("depth", [129, 900])
def test_a_block_with_an_extra_key_nested_too_deeply_is_ignored(depth: int) -> None:
    batch = decode(nested(depth))
    assert (batch.events, batch.malformed) == ((), 1)
    assert len(decode(nested(128)).events) == 1


def test_a_batch_that_is_nested_deeper_than_msgspec_reads_is_none() -> None:
    with pytest.raises(MalformedEvents):
        decode(nested(20_000))


@pytest.mark.parametrize(
    ("kind", "window", "seen"),
    [
        (None, None, None),
        ("full_attention", None, None),
        ("mla_attention", None, None),
        ("sliding_window", 128, 128),
        ("mamba", None, 0),
    ],
)
def test_a_group_sees_as_far_as_its_kind_of_attention(kind: str | None, window: int | None, seen: int | None) -> None:
    event = stored(group_idx=2, kv_cache_spec_kind=kind, kv_cache_spec_sliding_window=window)
    assert (event.group, event.window) == (2, seen)


def test_blocks_that_move_to_another_tier_come_without_tokens() -> None:
    event = stored(token_ids=[], block_size=0, medium="CPU")
    assert (event.hashes, event.token_ids, event.tier) == ((1, 2), b"", "host")


@pytest.mark.parametrize("key", [msgspec.msgpack.Ext(5, b"x"), {1: 2}, [{"inner": {b"k": 1}}]])
def test_an_extra_key_that_no_text_can_stand_for_costs_its_event_and_nothing_else(key: Any) -> None:
    event = {"type": "BlockStored", "block_hashes": [1], "token_ids": [1, 2], "block_size": 2, "extra_keys": [[key]]}
    batch = decode(msgspec.msgpack.encode([1.0, [event, {"type": "BlockRemoved", "block_hashes": [7]}], 0]))
    assert (batch.malformed, batch.events) == (1, (Removed((7,)),))


def test_extra_keys_that_fit_no_block_are_refused() -> None:
    whole = {
        "type": "BlockStored",
        "block_hashes": [1],
        "token_ids": [1],
        "block_size": 1,
        "extra_keys": [["a"], ["b"]],
    }
    batch = decode(msgspec.msgpack.encode([1.0, [whole], 0]))
    assert (batch.events, batch.malformed) == ((), 1)


def test_a_batch_without_a_time_is_none() -> None:
    with pytest.raises(MalformedEvents, match="no batch"):
        decode(msgspec.msgpack.encode({"events": []}))
