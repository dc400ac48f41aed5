"""Engines' cache events, rebuilt from their published schemas: one encoder for each wire format.

No engine runs here. Each class below has the fields, in the order and with the msgspec options, that the named version
documents; nothing is shared with the decoders.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

Hash = int | bytes


@dataclass(frozen=True)
class Put:
    """Blocks that an engine stored. `keys` has what else each block's hash depends on (vLLM)."""

    hashes: tuple[Hash, ...]
    parent: Hash | None
    tokens: tuple[int, ...]
    block_size: int
    lora: str | None = None
    salt: str | None = None
    keys: tuple[tuple[Any, ...] | None, ...] | None = None
    medium: str = "GPU"
    group: int | None = None
    kind: str | None = None
    window: int | None = None


@dataclass(frozen=True)
class Drop:
    """Blocks that an engine let go of."""

    hashes: tuple[Hash, ...]
    medium: str = "GPU"
    group: int | None = None


@dataclass(frozen=True)
class Clear:
    """All of them."""


Change = Put | Drop | Clear
Encoder = Callable[[float, Sequence[Change], int], bytes]


class _Array(msgspec.Struct, array_like=True, omit_defaults=True):
    pass


class _ArrayEvent(msgspec.Struct, array_like=True, omit_defaults=True, tag=True):
    pass


class _MapEvent(msgspec.Struct, omit_defaults=True, tag=True):
    pass


class _Cleared(_ArrayEvent, tag="AllBlocksCleared"):
    pass


class _MapCleared(_MapEvent, tag="AllBlocksCleared"):
    pass


# vLLM 0.8 and 0.9: five fields, a batch of two.
class _Batch2(_Array):
    ts: float
    events: list[Any]


class _Stored5(_ArrayEvent, tag="BlockStored"):
    block_hashes: list[Any]
    parent_block_hash: Any
    token_ids: list[Any]
    block_size: int
    lora_id: int | None


class _Removed1(_ArrayEvent, tag="BlockRemoved"):
    block_hashes: list[Any]


# vLLM from 0.10.2: the medium, and the data-parallel rank of the batch.
class _Batch3(_Array):
    ts: float
    events: list[Any]
    rank: int | None = None


class _Stored6(_ArrayEvent, tag="BlockStored"):
    block_hashes: list[Any]
    parent_block_hash: Any
    token_ids: list[Any]
    block_size: int
    lora_id: int | None
    medium: str | None


class _Removed2(_ArrayEvent, tag="BlockRemoved"):
    block_hashes: list[Any]
    medium: str | None


# vLLM before vllm#42892: the longest array.
class _Stored11(_ArrayEvent, tag="BlockStored"):
    block_hashes: list[Any]
    parent_block_hash: Any
    token_ids: list[Any]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class _Removed3(_ArrayEvent, tag="BlockRemoved"):
    block_hashes: list[Any]
    medium: str | None
    group_idx: int | None = None


# vLLM since vllm#42892 (0.24): maps in an array, and later maps in a map.
class _MapStored(_MapEvent, tag="BlockStored"):
    block_hashes: list[Any]
    parent_block_hash: Any
    token_ids: list[Any]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class _MapRemoved(_MapEvent, tag="BlockRemoved"):
    block_hashes: list[Any]
    medium: str | None
    group_idx: int | None = None


class _MapBatch(msgspec.Struct, omit_defaults=True):
    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


# A vLLM that does not exist yet: fields that were proposed (vllm#51243, #55488), and an unknown event.
class _FutureStored(_MapStored, tag="BlockStored"):
    locality: str = "?"
    ownership: dict[str, Any] = {}
    event_version: int = 0


class _Transferred(_MapEvent, tag="BlockTransferred"):
    block_hashes: list[Any]
    source: str


# SGLang 0.5.18: a map of metadata at position 7 where there is any.
class _Metadata(msgspec.Struct, omit_defaults=True):
    cache_salt: str | None = None
    session_id: str | None = None


class _StoredWithMetadata(_ArrayEvent, tag="BlockStored"):
    block_hashes: list[Any]
    parent_block_hash: Any
    token_ids: list[Any]
    block_size: int
    lora_id: int | None
    medium: str | None
    metadata: _Metadata


# SGLang since sglang#37482: maps.
class _SglangMapStored(_MapEvent, tag="BlockStored"):
    block_hashes: list[Any]
    parent_block_hash: Any
    token_ids: list[Any]
    block_size: int
    lora_id: int | None
    medium: str | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    lora_name: str | None = None


class _SglangMapBatch(msgspec.Struct, omit_defaults=True):
    ts: float
    events: list[Any]
    attn_dp_rank: int | None = None


_pack = msgspec.msgpack.Encoder().encode


def _base(put: Put) -> tuple[list[Any], Any, list[Any], int, int | None]:
    lora_id = None if put.lora is None else sum(put.lora.encode())
    return list(put.hashes), put.parent, list(put.tokens), put.block_size, lora_id


def _vllm_keys(put: Put) -> list[Any]:
    """LoRA name in each block, the salt in the first block of a prompt, after the keys of images."""
    keys = []
    for place in range(len(put.hashes)):
        entry = [put.lora] if put.lora else []
        entry += (put.keys[place] or ()) if put.keys else ()
        entry += [put.salt] if put.salt and put.parent is None and place == 0 else []
        keys.append(tuple(entry) or None)
    return keys


def vllm_0_9(ts: float, changes: Sequence[Change], rank: int) -> bytes:
    events = [
        _Stored5(*_base(e)) if isinstance(e, Put) else _Removed1(list(e.hashes)) if isinstance(e, Drop) else _Cleared()
        for e in changes
    ]
    return _pack(_Batch2(ts, events))


def vllm_0_11(ts: float, changes: Sequence[Change], rank: int) -> bytes:
    events = [
        _Stored6(*_base(e), e.medium)
        if isinstance(e, Put)
        else _Removed2(list(e.hashes), e.medium)
        if isinstance(e, Drop)
        else _Cleared()
        for e in changes
    ]
    return _pack(_Batch3(ts, events, rank))


def vllm_0_23(ts: float, changes: Sequence[Change], rank: int) -> bytes:
    events = [
        _Stored11(*_base(e), e.medium, e.lora, _vllm_keys(e), e.group, e.kind, e.window)
        if isinstance(e, Put)
        else _Removed3(list(e.hashes), e.medium, e.group)
        if isinstance(e, Drop)
        else _Cleared()
        for e in changes
    ]
    return _pack(_Batch3(ts, events, rank))


def _vllm_maps(events: Sequence[Change], stored: type[_MapStored]) -> list[Any]:
    return [
        stored(*_base(e), e.medium, e.lora, _vllm_keys(e), e.group, e.kind, e.window)
        if isinstance(e, Put)
        else _MapRemoved(list(e.hashes), e.medium, e.group)
        if isinstance(e, Drop)
        else _MapCleared()
        for e in events
    ]


def vllm_0_26(ts: float, events: Sequence[Change], rank: int) -> bytes:
    return _pack(_Batch3(ts, _vllm_maps(events, _MapStored), rank))


def vllm_map_batch(ts: float, events: Sequence[Change], rank: int) -> bytes:
    return _pack(_MapBatch(ts, _vllm_maps(events, _MapStored), rank))


def vllm_future(ts: float, changes: Sequence[Change], rank: int) -> bytes:
    events = _vllm_maps(changes, _FutureStored)
    for event in events:
        if isinstance(event, _FutureStored):
            event.locality, event.ownership, event.event_version = "LOCAL", {"pool": [1, 2]}, 3
    transferred = _Transferred([1, 2], "CPU")
    return _pack({"ts": ts, "events": [transferred, *events], "data_parallel_rank": rank, "schema": {"v": 9}})


def sglang_0_4(ts: float, events: Sequence[Change], rank: int) -> bytes:
    return vllm_0_9(ts, events, rank)


def sglang_0_5_9(ts: float, events: Sequence[Change], rank: int) -> bytes:
    return vllm_0_11(ts, events, rank)


def sglang_0_5_18(ts: float, changes: Sequence[Change], rank: int) -> bytes:
    events: list[Any] = []
    for e in changes:
        if isinstance(e, Put) and e.salt is not None:
            events.append(_StoredWithMetadata(*_base(e), e.medium, _Metadata(e.salt, "a-session")))
        elif isinstance(e, Put):
            events.append(_Stored6(*_base(e), e.medium))
        else:
            events.append(_Removed2(list(e.hashes), e.medium) if isinstance(e, Drop) else _Cleared())
    return _pack(_Batch3(ts, events, rank))


def sglang_maps(ts: float, changes: Sequence[Change], rank: int) -> bytes:
    events = [
        _SglangMapStored(*_base(e), e.medium, e.salt, "a-session", e.lora)
        if isinstance(e, Put)
        else _MapRemoved(list(e.hashes), e.medium)
        if isinstance(e, Drop)
        else _MapCleared()
        for e in changes
    ]
    return _pack(_SglangMapBatch(ts, events, rank))


def tensorrt_llm(changes: Sequence[Change], *, first_id: int, rank: int | None = None, window: int = 4096) -> bytes:
    """trtllm-serve 1.x: JSON of one drain. An engine that begins anew says `created`, which here is Clear."""
    events = []
    for number, e in enumerate(changes, first_id):
        event = {
            "event_id": number,
            "data": _trt_data(e),
            "window_size": window if e_window(e) is None else e_window(e),
        }
        events.append(event | ({} if rank is None else {"attention_dp_rank": rank}))
    return json.dumps(events).encode()


def e_window(event: Change) -> int | None:
    return event.window if isinstance(event, Put) else event.group if isinstance(event, Drop) else None


def _trt_data(event: Change) -> dict[str, Any]:
    if isinstance(event, Drop):
        return {"type": "removed", "block_hashes": list(event.hashes)}
    if isinstance(event, Clear):
        return {"type": "created", "num_blocks_per_cache_level": [64, 0]}
    return {
        "type": "stored",
        "parent_hash": event.parent,
        "blocks": [_trt_block(event, n) for n in range(len(event.hashes))],
    }


def _trt_block(put: Put, place: int) -> dict[str, Any]:
    tokens = put.tokens[place * put.block_size : (place + 1) * put.block_size]
    extra = put.keys[place] if put.keys else None
    return {
        "type": "stored_block",
        "block_hash": put.hashes[place],
        "tokens": [
            {"type": "unique_token", "token_id": token, "token_extra_id": extra[0] if extra else 0} for token in tokens
        ],
        "cache_level": 0 if put.medium == "GPU" else 1,
        "priority": 35,
    }


VLLM: dict[str, Encoder] = {
    "vllm-0.9": vllm_0_9,
    "vllm-0.11": vllm_0_11,
    "vllm-0.23": vllm_0_23,
    "vllm-0.26": vllm_0_26,
    "vllm-map-batch": vllm_map_batch,
    "vllm-future": vllm_future,
}
SGLANG: dict[str, Encoder] = {
    "sglang-0.4": sglang_0_4,
    "sglang-0.5.9": sglang_0_5_9,
    "sglang-0.5.18": sglang_0_5_18,
    "sglang-maps": sglang_maps,
}
TELLS_SALT = {"vllm-0.23", "vllm-0.26", "vllm-map-batch", "vllm-future", "sglang-0.5.18", "sglang-maps"}
"""Versions with the cache salt in their events."""
