"""Messages between routers and their encoding: MessagePack arrays, as msgspec writes tagged structs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, get_args

import msgspec

from backends.nesting import TooDeep, check_msgpack
from router.fleet.belief_news import Belief, Count, Learnt, Lost, Sent
from router.fleet.cluster.flights import Traffic
from router.shared.prefixes.prefix import Dropped, Prefix

MOST_BYTES = 2**16
"""Size at which a batch ends: Redis and readers handle each batch in one go."""

News = Belief | Prefix | Dropped


class Running(NamedTuple):
    """A router's running requests at each backend: all of them in `traffic`, if that is due, and `changes`."""

    traffic: dict[str, Traffic] | None = None
    changes: dict[str, Traffic] = {}  # noqa: RUF012 - never changed


class Batch(msgspec.Struct, frozen=True, array_like=True):
    """One message of a router: `news`, each with its age in ms, oldest first, and its running requests.

    `traffic` has all of them at each backend, so that it repairs a lost message; None: it was not due. `changes` has
    them at the backends where they have changed since this router's last message.
    """

    news: tuple[tuple[Count, News], ...] = ()
    traffic: dict[str, Traffic] | None = None
    changes: dict[str, Traffic] = {}


class _Loose(msgspec.Struct, frozen=True, array_like=True):
    news: tuple[tuple[Count, msgspec.Raw], ...] = ()
    traffic: dict[str, Traffic] | None = None
    changes: dict[str, Traffic] = {}


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
    try:
        # what is decoded is as deep as its types, so that the depth needs no check of its own, the slowest part
        return _decoder.decode(payload)
    except RecursionError:
        raise TooDeep from None
    except msgspec.ValidationError:
        check_msgpack(payload)
        loose = _loose.decode(payload)
        known = ((age_ms, raw) for age_ms, raw in loose.news if _kind.decode(raw).kind in _KINDS)
        return Batch(tuple((age_ms, _one.decode(raw)) for age_ms, raw in known), loose.traffic, loose.changes)


def batches(news: Sequence[tuple[float, News]], running: Running | None, now: float) -> Iterator[Batch]:
    """`news`, each with its time, in batches of about MOST_BYTES; `running` in the last one, also if it is empty."""
    aged: list[tuple[int, News]] = []
    size = 0
    for at, item in news:
        aged.append((max(0, round((now - at) * 1000)), item))
        size += _size(item)
        if size >= MOST_BYTES:
            yield Batch(tuple(aged))
            aged, size = [], 0
    if aged or running is not None:
        yield Batch(tuple(aged), *(running or Running()))


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
