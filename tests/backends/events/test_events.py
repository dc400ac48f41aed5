"""Promises of all decoders: bytes that are not events are an error, and an unreadable event adds no block."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.events import sglang, tensorrt_llm, vllm
from backends.events.nouns import Cleared, MalformedEvents, Removed, Stored, packed, tier_of

DECODERS: list[Callable[[bytes], Any]] = [vllm.decode, sglang.decode, tensorrt_llm.decode]
MSGPACK: list[Callable[[bytes], Any]] = DECODERS[:2]

JSON_LIKE = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=4,
)
TAGS = st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared", "BlockMoved"])
NAMES = ["block_hashes", "parent_block_hash", "token_ids", "block_size", "medium", "extra_keys", "cache_salt"]
ARRAYS = st.builds(lambda tag, rest: [tag, *rest], TAGS, st.lists(JSON_LIKE, max_size=6))
MAPS = st.builds(lambda tag, rest: {"type": tag, **rest}, TAGS, st.dictionaries(st.sampled_from(NAMES), JSON_LIKE))


def a_message(*events: Any, ts: Any = 1.0) -> bytes:
    return msgspec.msgpack.encode([ts, list(events), 0])


@pytest.mark.parametrize("decode", DECODERS)
@pytest.mark.parametrize(
    "data",
    [b"", b"\xc1", b"\x93", b"[", b"{}", b"\x80", msgspec.msgpack.encode("text"), msgspec.msgpack.encode([1.0]), b"7"],
)
def test_bytes_that_are_no_events_are_an_error(decode: Callable[[bytes], Any], data: bytes) -> None:
    with pytest.raises(MalformedEvents, match="no "):
        decode(data)


@given(st.binary(max_size=60))
@pytest.mark.parametrize("decode", DECODERS)
def test_whatever_comes_is_read_or_refused(decode: Callable[[bytes], Any], data: bytes) -> None:
    with suppress(MalformedEvents):
        decode(data)


@settings(max_examples=60)
@given(st.lists(ARRAYS | MAPS | JSON_LIKE, max_size=4))
@pytest.mark.parametrize("decode", MSGPACK)
def test_whatever_an_event_holds_the_batch_is_read(decode: Callable[[bytes], Any], events: list[Any]) -> None:
    batch = decode(a_message(*events))
    assert batch.sent_at == 1.0
    assert len(batch.events) + batch.unknown + batch.malformed >= len(events)


@given(
    st.lists(st.dictionaries(st.sampled_from(["event_id", "data", "window_size"]), JSON_LIKE) | JSON_LIKE, max_size=4)
)
def test_whatever_a_drain_holds_it_is_read(events: list[Any]) -> None:
    assert len(tensorrt_llm.decode(msgspec.json.encode(events))) == len(events)


@pytest.mark.parametrize("decode", MSGPACK)
@pytest.mark.parametrize("form", ["array", "map"])
@pytest.mark.parametrize(
    ("tokens", "block_size"), [([1, 2, 3], 2), ([1, 2, 3, -4], 2), ([1, 2, 3, 2**32], 2), ([1, 2], 0), ("ab", 2)]
)
def test_blocks_that_cannot_be_read_are_skipped_and_counted(
    decode: Callable[[bytes], Any], form: str, tokens: Any, block_size: int
) -> None:
    bad: Any = ["BlockStored", [1, 2], None, tokens, block_size, None]
    if form == "map":
        bad = {"type": "BlockStored", "block_hashes": [1, 2], "token_ids": tokens, "block_size": block_size}
    batch = decode(a_message(bad, ["BlockStored", [3], None, [1, 2], 2, None]))
    assert batch.malformed == 1
    assert batch.events == (Stored((3,), None, packed([1, 2]), 2),)


@pytest.mark.parametrize("decode", MSGPACK)
@pytest.mark.parametrize("bad", [["BlockRemoved", "nonsense"], {"type": "BlockRemoved"}, [], {"hashes": [1]}, 7, [7]])
def test_an_invalid_event_about_removed_blocks_clears_everything(decode: Callable[[bytes], Any], bad: Any) -> None:
    batch = decode(a_message(bad))
    assert (batch.events, batch.malformed) == ((Cleared(),), 1)


@pytest.mark.parametrize("decode", MSGPACK)
@pytest.mark.parametrize("new", [["BlockMoved", [1], "x"], {"type": "BlockMoved", "to": "disk"}])
def test_events_of_the_future_are_counted_and_left_alone(decode: Callable[[bytes], Any], new: Any) -> None:
    batch = decode(a_message(new, ["BlockRemoved", [1], "GPU", None, "a new field"]))
    assert (batch.unknown, batch.malformed, batch.events) == (1, 0, (Removed((1,)),))


def test_a_medium_is_a_tier() -> None:
    media = [None, "GPU", "CPU", "CPU_PINNED", "DISK", "EXTERNAL"]
    assert [tier_of(medium) for medium in media] == ["device", "device", "host", "host", "disk", "external"]


def test_a_store_without_hashes_is_none() -> None:
    with pytest.raises(MalformedEvents, match="without hashes"):
        Stored((), None, b"", 4)


def test_extra_keys_are_as_many_as_blocks() -> None:
    with pytest.raises(MalformedEvents, match="extra keys"):
        Stored((1, 2), None, b"", 4, extra_keys=(("a",),))
