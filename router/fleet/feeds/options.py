"""A pool's options for its engines' cache events."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from urllib.parse import urlsplit

from backends.base import EventAddress
from policies.errors import ConfigError
from policies.quantities import digits
from policies.sla.pools import Option, PoolSpec
from router.fleet.feeds.sink import RankCache

FEED_OPTIONS = frozenset({"events", "events_engine", "events_ranks", "events_topic", "replay"})
"""Options of a pool that are for feeds and not for its backends."""

ENGINES = ("vllm", "sglang", "tensorrt_llm")
OVER_ZMQ = frozenset({"vllm", "sglang"})
ASKED = frozenset({"vllm"})
"""Kinds of backends that can be asked where they publish."""

NO_EVENTS = "none"
"""Value of `events` for a pool without feeds."""

_MOST_RANKS = 256
_SOCKET = re.compile(r"(?:tcp://(?:\*|\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):[0-9]{1,5}|ipc://.+)")
_URL = re.compile(r"https?://(?:\*|\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::[0-9]{1,5})?(?:/[^\s?#]*)?")


@dataclass(frozen=True, slots=True)
class FeedSpec:
    """One engine process with events: the address where it publishes, and the one where it replays messages.

    `events` and `replay` are ZeroMQ addresses; for TensorRT-LLM `events` is the server's URL.
    """

    source: RankCache
    engine: str
    events: str
    replay: str | None = None
    topic: str = ""


def backend_options(options: Mapping[str, Option]) -> dict[str, Option]:
    """The options that are for the backends themselves."""
    return {name: value for name, value in options.items() if name not in FEED_OPTIONS}


def feed_specs(pool: PoolSpec, backends: tuple[str, ...]) -> tuple[FeedSpec, ...]:
    """The feeds of a pool with addresses for `backends`, in the same order; none if it names no events.

    `*` for a host stands for the backend's host, so that the file can have the same text as the engine's options. Rank
    r of `events_ranks` publishes r ports further. Raises ConfigError.
    """
    if "events" not in pool.options or is_switched_off(pool):
        stray = sorted((FEED_OPTIONS & set(pool.options)) - {"events"})
        if stray:
            raise ConfigError(f"{pool.name}: option {stray[0]!r} has no effect without events")
        return ()
    engine = _engine(pool)
    is_polled = engine == "tensorrt_llm"
    events = _addresses(pool, "events", is_polled)
    replay = _addresses(pool, "replay", is_polled) if "replay" in pool.options else (None,) * len(events)
    if is_polled and "replay" in pool.options:
        raise ConfigError(f"{pool.name}: {engine} has no replay", hint="leave replay out")
    ranks = 1 if is_polled else _ranks(pool)
    return tuple(
        FeedSpec(
            RankCache(backend, rank),
            engine,
            _offset(at, rank),
            again and _offset(again, rank),
            _text(pool, "events_topic"),
        )
        for backend, at, again in zip(backends, events, replay, strict=True)
        for rank in range(ranks)
    )


def is_switched_off(pool: PoolSpec) -> bool:
    """Whether the pool says `events: none`, so that its backends have no feeds even if they publish."""
    return pool.options.get("events") == NO_EVENTS


def may_publish(pool: PoolSpec) -> str:
    """The engine of `pool` if its events come over ZeroMQ, or may; else empty. Raises ConfigError."""
    if is_switched_off(pool) or ("events" not in pool.options and pool.kind not in ASKED):
        return ""
    engine = _engine(pool)
    return engine if engine in OVER_ZMQ else ""


def unheard(pools: Iterable[PoolSpec]) -> list[str]:
    """Why this router cannot receive events of `pools`, a sentence for each pool. Raises ConfigError."""
    if find_spec("zmq") is not None:
        return []
    return [
        f"pool '{pool.name}': cache events of {engine} cannot be received, because pyzmq is not installed; "
        "pip install 'pointsman[feeds]', or write events: none"
        for pool in pools
        if (engine := may_publish(pool))
    ]


def published_specs(backend: str, address: str, published: Iterable[EventAddress]) -> tuple[FeedSpec, ...]:
    """The feeds of a vLLM at `address` that reports itself where its ranks publish.

    An address that only the engine's machine can reach is left out if the engine is on another machine than this one.
    """
    host = _host(address)
    return tuple(
        FeedSpec(RankCache(backend, each.rank), "vllm", events, _reachable(each.replay, host) if each.replay else None)
        for each in published
        if 0 <= each.rank < _MOST_RANKS and (events := _reachable(each.events, host))
    )


def found_specs(pool: PoolSpec, backend: str, address: str) -> tuple[FeedSpec, ...]:
    """The feeds of a `backend` that was found at `address` at run time; none if `pool` names no events.

    Only the host of such a backend is known, so `*` must stand for it. Raises ConfigError.
    """
    for name in ("events", "replay"):
        value = pool.options.get(name, "://*")
        if not (isinstance(value, str) and "://*" in value):
            hint = "write * for the host, such as tcp://*:5557, or name the backends in at"
            raise ConfigError(f"{pool.name} finds backends at run time: {name} must fit all of them", hint=hint)
    return feed_specs(replace(pool, at=(address,)), (backend,))


def _engine(pool: PoolSpec) -> str:
    engine = _text(pool, "events_engine") or pool.kind
    if engine not in ENGINES:
        hint = f"write events_engine: one of {', '.join(ENGINES)}"
        raise ConfigError(f"{pool.name}: events of {engine!r} are not supported", hint=hint)
    return engine


def _ranks(pool: PoolSpec) -> int:
    text = _text(pool, "events_ranks") or "1"
    ranks = digits(text, most=_MOST_RANKS)
    if not ranks:
        raise ConfigError(f"{pool.name}: events_ranks must be a number from 1 to {_MOST_RANKS}, not {text!r}")
    return ranks


def _text(pool: PoolSpec, name: str) -> str:
    value = pool.options.get(name, "")
    if not isinstance(value, str):
        raise ConfigError(f"{pool.name}: {name} must be one text, not a list")
    return value


def _addresses(pool: PoolSpec, name: str, is_polled: bool) -> tuple[str, ...]:
    """One address for each of the pool's, in order."""
    value = pool.options[name]
    texts = (value,) if isinstance(value, str) else value
    pattern, example = (_URL, "http://*:8000") if is_polled else (_SOCKET, "tcp://*:5557")
    for text in texts:
        if not pattern.fullmatch(text):
            raise ConfigError(f"{pool.name}: {name} must be an address like {example}, not {text!r}")
    if len(texts) == 1 and (len(pool.at) == 1 or "://*" in texts[0]):
        texts *= len(pool.at)
    if len(texts) != len(pool.at):
        hint = f"write one for each address, or {example} for the port on each of their hosts"
        raise ConfigError(f"{pool.name} has {len(pool.at)} addresses and {len(texts)} of {name}", hint=hint)
    return tuple(text.replace("://*", f"://{_host(at)}", 1) for text, at in zip(texts, pool.at, strict=True))


def _host(address: str) -> str:
    """The host of host:port or of a URL, in brackets if it is IPv6."""
    netloc = urlsplit(address).netloc if "://" in address else address
    host, colon, port = netloc.rpartition(":")
    return host if colon and digits(port, most=65535) is not None else netloc


def _reachable(endpoint: str, host: str) -> str | None:
    """`endpoint` of an engine on `host`, as reachable from here; None if it is not."""
    if not _SOCKET.fullmatch(endpoint) or not endpoint.startswith("tcp://"):
        return None
    place, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    if place in ("*", "0.0.0.0", "[::]"):  # noqa: S104 - the engine listens there, not this router
        return f"tcp://{host}:{port}"
    return None if _is_loopback(place) and not _is_loopback(host) else endpoint


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "[::1]") or host.startswith("127.")


def _offset(address: str, rank: int) -> str:
    if not rank:
        return address
    head, _, port = address.rpartition(":")
    number = digits(port, most=65535)
    if number is None:
        raise ConfigError(f"{address} has no port to count rank {rank} from", hint="use tcp:// with events_ranks")
    return f"{head}:{number + rank}"
