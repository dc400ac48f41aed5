"""TensorRT-LLM's KV cache events, as trtllm-serve answers to POST /kv_cache_events. Pure.

Source: trtllm-serve and its event serializer: a JSON list of {event_id, window_size, attention_dp_rank, data}, and
data is created, stored, removed or updated. Event ids count up by one on each attention-DP rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from backends.events.nouns import BlockHash, CacheEvent, Cleared, MalformedEvents, Removed, Stored, packed
from backends.nesting import is_deep

_LEVELS = ("device", "host")
_Hash = int | str


@dataclass(frozen=True, slots=True)
class NumberedEvents:
    """The contents of the event with number `seq` of attention-DP `rank`.

    `unknown` and `malformed` as in a Batch. A `malformed` one without a number has neither `seq` nor `rank`.
    """

    seq: int | None
    rank: int
    events: tuple[CacheEvent, ...]
    unknown: int = 0
    malformed: int = 0


class _Token(msgspec.Struct):
    token_id: int
    token_extra_id: int = 0


class _Block(msgspec.Struct):
    block_hash: _Hash
    tokens: list[_Token]
    cache_level: int = 0
    lora_id: int | None = None
    cache_salt: int | str | None = None
    cache_salt_id: int | str | None = None
    mm_keys: list[Any] = []


class _Difference(msgspec.Struct):
    new_value: int
    old_value: int


class _StoredData(msgspec.Struct, tag="stored"):
    blocks: list[_Block]
    parent_hash: _Hash | None = None


class _RemovedData(msgspec.Struct, tag="removed"):
    block_hashes: list[_Hash]


class _UpdatedData(msgspec.Struct, tag="updated"):
    block_hash: _Hash
    cache_level: _Difference | None = None


class _CreatedData(msgspec.Struct, tag="created"):
    """The cache is new, and empty."""


class _Event(msgspec.Struct):
    event_id: int
    data: msgspec.Raw
    window_size: int | None = None
    attention_dp_rank: int | None = None


class _Tag(msgspec.Struct):
    type: str


_Data = _StoredData | _RemovedData | _UpdatedData | _CreatedData


def decode(body: bytes) -> list[NumberedEvents]:
    """The events of one drain, in order. Raises MalformedEvents if the body is not a list of events."""
    try:
        raws = _LIST.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedEvents(f"no list of events: {error}") from error
    return [_numbered(raw) for raw in raws or ()]


def _numbered(raw: msgspec.Raw) -> NumberedEvents:
    try:
        event = _EVENT.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return NumberedEvents(None, 0, (), malformed=1)
    rank = event.attention_dp_rank or 0
    try:
        return NumberedEvents(event.event_id, rank, _meaning(_DATA.decode(event.data), event.window_size))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, MalformedEvents):
        tag = _tag(event.data)
        if tag == "stored":
            return NumberedEvents(event.event_id, rank, (), malformed=1)
        if tag is None or tag in ("removed", "updated", "created"):
            return NumberedEvents(event.event_id, rank, (Cleared(),), malformed=1)
        return NumberedEvents(event.event_id, rank, (), unknown=1)


def _meaning(data: _Data, window: int | None) -> tuple[CacheEvent, ...]:
    """`data` in the shared nouns. A window identifies a cache group and its attention window."""
    if isinstance(data, _StoredData):
        return tuple(_stored(data, window))
    if isinstance(data, _RemovedData):
        return (Removed(tuple(data.block_hashes), tier=None, group=window),)
    if isinstance(data, _UpdatedData):
        if data.cache_level is None:
            return ()
        hashes: tuple[BlockHash, ...] = (data.block_hash,)
        there = Stored(hashes, None, b"", 0, _tier(data.cache_level.new_value), group=window, window=window)
        return (there, Removed(hashes, _tier(data.cache_level.old_value), group=window))
    return (Cleared(is_empty=True),)


def _stored(data: _StoredData, window: int | None) -> list[Stored]:
    """One event for each block: sizes, tiers and extra ids may differ. A block in the making has fewer tokens."""
    stored, parent = [], data.parent_hash
    for block in data.blocks:
        salt = block.cache_salt if block.cache_salt is not None else block.cache_salt_id
        extra = [f"{at}:{token.token_extra_id}" for at, token in enumerate(block.tokens) if token.token_extra_id]
        if is_deep(block.mm_keys):
            raise MalformedEvents("a multimodal key is nested too deeply")
        extra += [msgspec.json.encode(key).decode() for key in block.mm_keys]
        stored.append(
            Stored(
                hashes=(block.block_hash,),
                parent=parent,
                token_ids=packed([token.token_id for token in block.tokens]),
                block_tokens=len(block.tokens),
                tier=_tier(block.cache_level),
                adapter=None if block.lora_id is None else f"lora_id:{block.lora_id}",
                salt=None if salt is None else str(salt),
                extra_keys=(tuple(extra),) if extra else (),
                group=window,
                window=window,
            )
        )
        parent = block.block_hash
    return stored


def _tier(level: int) -> str:
    return _LEVELS[level] if 0 <= level < len(_LEVELS) else f"level{level}"


def _tag(data: msgspec.Raw) -> str | None:
    try:
        return _TAG.decode(data).type
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


_LIST = msgspec.json.Decoder(list[msgspec.Raw] | None)
_EVENT = msgspec.json.Decoder(_Event)
_DATA: msgspec.json.Decoder[_Data] = msgspec.json.Decoder(_Data)
_TAG = msgspec.json.Decoder(_Tag)
