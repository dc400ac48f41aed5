"""Messages between routers and their encoding: MessagePack arrays, as msgspec writes tagged structs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

import msgspec

from backends.nesting import check_msgpack
from router.fleet.belief_news import Belief, Count, Learnt, Lost, Sent
from router.fleet.cluster.flights import Traffic
from router.shared.prefixes.prefix import Dropped, Prefix

MOST_BYTES = 2**16
"""Size at which a batch ends: Redis and readers handle each batch in one go."""

News = Belief | Prefix | Dropped


class Batch(msgspec.Struct, frozen=True, array_like=True):
    """One message of a router: `news`, each with its age in ms, oldest first, and its running requests.

    `traffic` has all of them at each backend, so that the next batch repairs a lost one; None: unchanged.
    """

    news: tuple[tuple[Count, News], ...] = ()
    traffic: dict[str, Traffic] | None = None


class _Loose(msgspec.Struct, frozen=True, array_like=True):
    news: tuple[tuple[Count, msgspec.Raw], ...] = ()
    traffic: dict[str, Traffic] | None = None


class _Kind(msgspec.Struct, array_like=True):
    kind: str


_encoder, _decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(Batch)
_loose, _kind = msgspec.msgpack.Decoder(_Loose), msgspec.msgpack.Decoder(_Kind)
_one: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(News)
_KINDS = frozenset(str(kind.__struct_config__.tag) for kind in get_args(News))


def encode(batch: Batch) -> bytes:
    """The bytes of `batch`."""
    return _encoder.encode(batch)


def decode(payload: bytes) -> Batch:
    """The batch in `payload`, without news of kinds that only later versions know. Raises ValueError if it is none.

    Unknown fields at the end of a struct are skipped too, so that routers of two versions can share a stream.
    """
    check_msgpack(payload)
    try:
        return _decoder.decode(payload)
    except msgspec.ValidationError:
        loose = _loose.decode(payload)
        known = ((age_ms, raw) for age_ms, raw in loose.news if _kind.decode(raw).kind in _KINDS)
        return Batch(tuple((age_ms, _one.decode(raw)) for age_ms, raw in known), loose.traffic)


def batches(news: Sequence[tuple[float, News]], traffic: Mapping[str, Traffic] | None, now: float) -> Iterator[Batch]:
    """`news`, each with its time, in batches of about MOST_BYTES; `traffic` in the last one."""
    aged: list[tuple[int, News]] = []
    size = 0
    for at, item in news:
        aged.append((max(0, round((now - at) * 1000)), item))
        size += _size(item)
        if size >= MOST_BYTES:
            yield Batch(tuple(aged))
            aged, size = [], 0
    if aged or traffic is not None:
        yield Batch(tuple(aged), None if traffic is None else dict(traffic))


def _size(news: News) -> int:
    match news:
        case Sent():
            return 64 + 9 * len(news.noted)
        case Learnt():
            return 64 + 9 * len(news.keys)
        case Prefix():
            return 256 + 64 * len(news.places)
        case Lost() | Dropped():
            return 64
