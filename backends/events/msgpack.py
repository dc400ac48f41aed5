"""The envelope that vLLM and SGLang share: a batch of tagged events in msgpack, each as an array or as a map. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from backends.events.nouns import Batch, Cleared, Gathered, MalformedEvents, Removed, Stored, tier_of
from backends.nesting import is_deep

_STORED, _REMOVED, _CLEARED = "BlockStored", "BlockRemoved", "AllBlocksCleared"
_TELLS_OF_REMOVAL = {_REMOVED, _CLEARED}

Hash = int | bytes


class _ArrayBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[msgspec.Raw]
    rank: int | None = None


class _MapBatch(msgspec.Struct):
    """vLLM calls the rank data_parallel_rank, SGLang attn_dp_rank."""

    ts: float
    events: list[msgspec.Raw]
    data_parallel_rank: int | None = None
    attn_dp_rank: int | None = None


class ArrayRemoved(msgspec.Struct, array_like=True, tag=_REMOVED):
    """BlockRemoved by position. SGLang has no group."""

    block_hashes: list[Hash]
    medium: str | None = None
    group_idx: int | None = None


class MapRemoved(msgspec.Struct, tag=_REMOVED):
    """BlockRemoved by name."""

    block_hashes: list[Hash]
    medium: str | None = None
    group_idx: int | None = None


class _ArrayCleared(msgspec.Struct, array_like=True, tag=_CLEARED):
    pass


class _MapCleared(msgspec.Struct, tag=_CLEARED):
    pass


class _MapTag(msgspec.Struct):
    type: str


@dataclass(frozen=True, slots=True)
class Dialect:
    """One engine's BlockStored, by position and by name, both tagged with their class' tag, and its meaning."""

    array: type[msgspec.Struct]
    map: type[msgspec.Struct]
    meaning: Callable[[Any], Stored]


class BatchDecoder:
    """Reads batches of one engine, in any version: unknown fields are ignored.

    An event that cannot be read is skipped and counted; if it reported a removal, everything is cleared
    instead, so that nothing is believed to be there that is not. Events with an unknown tag are counted.
    """

    def __init__(self, dialect: Dialect) -> None:
        self._meaning = dialect.meaning
        array = dialect.array | ArrayRemoved | _ArrayCleared
        by_name = dialect.map | MapRemoved | _MapCleared
        self._array_event: msgspec.msgpack.Decoder[object] = msgspec.msgpack.Decoder(array)
        self._map_event: msgspec.msgpack.Decoder[object] = msgspec.msgpack.Decoder(by_name)
        self._array_batch = msgspec.msgpack.Decoder(_ArrayBatch)
        self._map_batch = msgspec.msgpack.Decoder(_MapBatch)
        self._map_tag = msgspec.msgpack.Decoder(_MapTag)

    def decode(self, payload: bytes) -> Batch:
        """The events of one message. Raises MalformedEvents if it is not a batch."""
        try:
            if _is_map(payload):
                named = self._map_batch.decode(payload)
                rank = named.attn_dp_rank if named.data_parallel_rank is None else named.data_parallel_rank
                ts, events = named.ts, named.events
            else:
                batch = self._array_batch.decode(payload)
                ts, events, rank = batch.ts, batch.events, batch.rank
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise MalformedEvents(f"no batch of events: {error}") from error
        gathered = Gathered()
        for raw in events:
            self._read(raw, gathered)
        return gathered.batch(ts, rank)

    def _read(self, raw: msgspec.Raw, gathered: Gathered) -> None:
        is_map = _is_map(raw)
        try:
            event = (self._map_event if is_map else self._array_event).decode(raw)
            if isinstance(event, ArrayRemoved | MapRemoved):
                gathered.events.append(Removed(tuple(event.block_hashes), tier_of(event.medium), event.group_idx))
            elif isinstance(event, _ArrayCleared | _MapCleared):
                gathered.events.append(Cleared(is_empty=True))
            else:
                gathered.events.append(self._meaning(event))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, MalformedEvents):
            tag = self._tag(raw, is_map)
            if tag == _STORED:
                # an ignored block is safe, and so are its children, because their parent is unknown
                gathered.skip(may_have_removed=False)
            elif tag is None or tag in _TELLS_OF_REMOVAL:
                gathered.skip(may_have_removed=True)
            else:
                gathered.unknown += 1

    def _tag(self, raw: msgspec.Raw, is_map: bool) -> str | None:
        """The tag of an event that could not be read; None if it has none."""
        try:
            if is_map:
                return self._map_tag.decode(raw).type
            parts = msgspec.msgpack.decode(raw, type=list[msgspec.Raw])
            return msgspec.msgpack.decode(parts[0], type=str) if parts else None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None


def text_of(extra: object) -> str:
    """One entry of an engine's extra keys as text that is equal where the entry is. Raises MalformedEvents."""
    if isinstance(extra, str):
        return extra
    if isinstance(extra, bytes):
        return extra.hex()
    if is_deep(extra):
        raise MalformedEvents("an extra key is nested too deeply")
    try:
        return msgspec.json.encode(extra, order="deterministic").decode()
    except (TypeError, ValueError) as error:
        raise MalformedEvents(f"an extra key is nothing that JSON can say: {error}") from error


def _is_map(data: bytes | msgspec.Raw) -> bool:
    """Whether the msgpack `data` begins with a map (fixmap, map 16, map 32)."""
    view = memoryview(data)
    return bool(view.nbytes) and (view[0] & 0xF0 == 0x80 or view[0] in (0xDE, 0xDF))
