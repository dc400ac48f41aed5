from __future__ import annotations

from typing import Any

import msgspec

from backends.events.nouns import Stored, packed
from backends.events.sglang import decode, epoch_of


def stored(event: Any) -> Stored:
    (read,) = decode(msgspec.msgpack.encode([1.0, [event], 0])).events
    assert isinstance(read, Stored)
    return read


def test_metadata_stands_at_the_place_of_vllms_adapter() -> None:
    event = stored(
        ["BlockStored", [1], None, [5, 6], 2, None, "GPU", {"cache_salt": "acme", "session_id": "s", "new": 1}]
    )
    assert (event.salt, event.adapter) == ("acme", None)


def test_an_adapter_is_known_by_name_or_by_number() -> None:
    named = {"type": "BlockStored", "block_hashes": [1], "token_ids": [5], "block_size": 1, "lora_name": "chat"}
    assert stored(named).adapter == "chat"
    assert stored(["BlockStored", [1], None, [5], 1, 4]).adapter == "lora_id:4"


def test_pages_of_pairs_are_named_by_the_first_of_each() -> None:
    event = stored(["BlockStored", [1], None, [[5, 6], [6, 7]], 2, None, "GPU"])
    assert event.token_ids == packed([5, 6])


def test_pages_may_have_one_token() -> None:
    event = stored(["BlockStored", [1, 2, 3], None, [5, 6, 7], 1, None])
    assert (event.block_tokens, len(event.hashes)) == (1, 3)


def test_a_topic_may_have_the_epoch() -> None:
    assert epoch_of(b"kv@pod") is None
    assert epoch_of(b"kv@pod\x00sgl-kv-epoch=4f2a") == "4f2a"
    assert epoch_of(b"\x00sgl-kv-epoch=4f2a\x00sgl-kv-snapshot=9") == "4f2a"
