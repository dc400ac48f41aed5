"""SGLang's KV events (`--kv-events-config`): arrays, arrays with a map of metadata (0.5.18), and maps. Pure.

Source: SGLang's `EventBatch` and its events. With EAGLE a page lists pairs of neighbouring tokens; the first of each
pair is the page's own. A publisher with a snapshot endpoint writes its epoch into the topic of each live message.
"""

from __future__ import annotations

from typing import Any

import msgspec

from backends.events.msgpack import BatchDecoder, Dialect, Hash
from backends.events.nouns import Batch, Stored, packed, tier_of

_EPOCH_MARK = b"\x00sgl-kv-epoch="

_Tokens = list[int | tuple[int, int]]


class _ArrayStored(msgspec.Struct, array_like=True, tag="BlockStored"):
    """By position; `metadata` is a map and there only where it has anything."""

    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: _Tokens
    block_size: int
    lora_id: int | str | None = None
    medium: str | None = None
    metadata: Any = None


class _MapStored(msgspec.Struct, tag="BlockStored"):
    """By name; the former metadata are fields of their own."""

    block_hashes: list[Hash]
    parent_block_hash: Hash | None = None
    token_ids: _Tokens = []
    block_size: int = 0
    lora_id: int | str | None = None
    medium: str | None = None
    lora_name: str | None = None
    cache_salt: str | None = None


def decode(payload: bytes) -> Batch:
    """The events of one message's payload. Raises MalformedEvents if it is not a batch."""
    return _DECODER.decode(payload)


def epoch_of(topic: bytes) -> str | None:
    """The publisher's epoch, if it writes one into the topic."""
    _, mark, rest = topic.partition(_EPOCH_MARK)
    return rest.partition(b"\x00")[0].decode(errors="replace") if mark else None


def _stored(event: _ArrayStored | _MapStored) -> Stored:
    if isinstance(event, _MapStored):
        lora_name, salt = event.lora_name, event.cache_salt
    else:
        metadata = event.metadata if isinstance(event.metadata, dict) else {}
        lora_name, salt = _text(metadata.get("lora_name")), _text(metadata.get("cache_salt"))
    if lora_name is None and event.lora_id is not None:
        lora_name = f"lora_id:{event.lora_id}"
    tokens = [token if isinstance(token, int) else token[0] for token in event.token_ids]
    return Stored(
        hashes=tuple(event.block_hashes),
        parent=event.parent_block_hash,
        token_ids=packed(tokens),
        block_tokens=event.block_size,
        tier=tier_of(event.medium),
        adapter=lora_name,
        salt=salt,
    )


def _text(value: object) -> str | None:
    return None if value is None else str(value)


_DECODER = BatchDecoder(Dialect(_ArrayStored, _MapStored, _stored))
