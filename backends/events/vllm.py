"""vLLM's KV events (`--kv-events-config`, publisher zmq), from the arrays of 0.8 to the maps since 0.24. Pure.

Source: vLLM's `EventBatch` and its events; the order of `extra_keys` is LoRA, multimodal identifiers, cache salt, hash
of prompt embeddings.
"""

from __future__ import annotations

from typing import Any

import msgspec

from backends.events.msgpack import BatchDecoder, Dialect, Hash, text_of
from backends.events.nouns import Batch, MalformedEvents, Stored, packed, tier_of

_FULL_ATTENTION = frozenset({"full_attention", "mla_attention", "sink_full_attention"})

_ExtraKeys = list[list[Any] | None]


class _ArrayStored(msgspec.Struct, array_like=True, tag="BlockStored"):
    """By position; older versions end earlier."""

    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: _ExtraKeys | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class _MapStored(msgspec.Struct, tag="BlockStored"):
    """By name."""

    block_hashes: list[Hash]
    parent_block_hash: Hash | None = None
    token_ids: list[int] = []
    block_size: int = 0
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: _ExtraKeys | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


def decode(payload: bytes) -> Batch:
    """The events of one message's payload. Raises MalformedEvents if it is not a batch."""
    return _DECODER.decode(payload)


def _stored(event: _ArrayStored | _MapStored) -> Stored:
    adapter = event.lora_name
    if adapter is None and event.lora_id is not None:
        # a name that no client can use: such blocks are known and match no request
        adapter = f"lora_id:{event.lora_id}"
    salt, extra_keys = _salt_and_rest(event, {event.lora_name, event.lora_id} - {None})
    return Stored(
        hashes=tuple(event.block_hashes),
        parent=event.parent_block_hash,
        token_ids=packed(event.token_ids),
        block_tokens=event.block_size,
        tier=tier_of(event.medium),
        adapter=adapter,
        salt=salt,
        extra_keys=extra_keys,
        group=event.group_idx,
        window=_window(event),
    )


def _salt_and_rest(
    event: _ArrayStored | _MapStored, adapters: set[str | int | None]
) -> tuple[str | None, tuple[tuple[str, ...], ...]]:
    """The cache salt, and each block's other extra keys; no block has any: ().

    The salt is the last text of a prompt's first block. An image's identifier there may be mistaken for it: then its
    blocks are attributed to another domain and match no prompt, which loses a hit and reveals nothing.
    """
    if not event.extra_keys:
        return None, ()
    if len(event.extra_keys) != len(event.block_hashes):
        raise MalformedEvents(f"{len(event.block_hashes)} blocks have {len(event.extra_keys)} extra keys")
    keys = [[key for key in entry or () if not _names(adapters, key)] for entry in event.extra_keys]
    salt = None
    if event.parent_block_hash is None:
        places = [place for place, key in enumerate(keys[0]) if isinstance(key, str)]
        if places:
            salt = keys[0].pop(places[-1])
    rest = tuple(tuple(map(text_of, entry)) for entry in keys)
    return salt, rest if any(rest) else ()


def _names(adapters: set[str | int | None], key: object) -> bool:
    return isinstance(key, str | int) and key in adapters


def _window(event: _ArrayStored | _MapStored) -> int | None:
    """The attention window of this cache group; a kind without full attention and without a window has 0."""
    if event.kv_cache_spec_sliding_window is not None:
        return event.kv_cache_spec_sliding_window
    kind = event.kv_cache_spec_kind
    return None if kind is None or kind in _FULL_ATTENTION else 0


_DECODER = BatchDecoder(Dialect(_ArrayStored, _MapStored, _stored))
