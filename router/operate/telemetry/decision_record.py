"""The decision log's record of one prompt: sizes, keys and times, never text. `docs/decision-log.md` explains it."""

from __future__ import annotations

import hashlib
import struct
from base64 import b64decode, b64encode
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median_low

import msgspec
from xxhash import xxh3_64_intdigest

from policies.learning.cost import Latency
from policies.nouns import BackendView, ClusterView, Decision, Fetch, Request, Usage
from router.call.bid import Placed
from router.fleet.cluster.flights import Flight
from shards.kv.keys import BLOCK_TOKENS, TOKEN_BYTES, root_key

VERSION = 1
"""Version of the record. A field may be added without a new version; no field changes its meaning."""

KEYS_EVERY_BLOCKS = 8
"""Every eighth block key is kept, one for 512 tokens: keys are chained, so each stands for those before it."""

KEY_TOKENS = KEYS_EVERY_BLOCKS * BLOCK_TOKENS
"""Tokens of a prompt for each kept key, if they were counted."""

_KEY_BYTES = KEY_TOKENS * TOKEN_BYTES

MOST_SEEN = 16
"""Most backends kept of one view: the chosen one, and those with the best scores first."""

MOST_DROPPED = 64
"""Most dropped backends kept of one decision."""


class SeenBackend(msgspec.Struct, frozen=True, omit_defaults=True):
    """One backend in the decision's view."""

    backend: str
    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    free_tokens: int | None = None
    held_tokens: int | None = None
    queue_s: float = 0.0
    adapter: str | None = None
    age_s: float | None = None


class Try(msgspec.Struct, frozen=True, omit_defaults=True):
    """A decision, and the attempt that followed if it chose a backend. Times are seconds since the prompt arrived."""

    policy: str
    at_s: float
    backend: str | None = None
    predicted_ttft_s: float | None = None
    backends: int = 0
    seen: tuple[SeenBackend, ...] = ()
    scores: tuple[tuple[str, float], ...] = ()
    dropped: tuple[tuple[str, str], ...] = ()
    first_s: float | None = None
    last_s: float | None = None
    left_out: int = 0
    cache_tokens: int | None = None
    max_requests: int | None = None
    speed: tuple[float, float, float, float, float, float] | None = None
    pace: tuple[float, float] = (1.0, 1.0)
    fetch: tuple[str, int, float] | None = None
    prefill: str | None = None


class Record(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of the log: one prompt, from its arrival to its end."""

    version: int
    time: float
    request: str
    tenant: str
    domain: str
    model: str
    service_class: str
    rank: int
    rule: int
    config: str
    prompt_tokens: int
    max_new_tokens: int
    outcome: str
    code: str
    seconds: float
    choices: int = 1
    preemptible: bool = False
    stream: bool = False
    priority: str | None = None
    session: str | None = None
    deadline_s: float | None = None
    pools: tuple[str, ...] | None = None
    keys: str = ""
    tries: tuple[Try, ...] = ()
    ttft_s: float | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    blended_tokens: int | None = None
    trace_id: str | None = None
    error: str | None = None
    likely_prompt_tokens: tuple[int, int] | None = None
    shared_keys: str = ""
    key_tokens: int = KEY_TOKENS
    ttft_target_s: float | None = None
    tpot_target_s: float | None = None
    cache_write_tokens: int = 0
    images: int = 0
    backend_ms: int = 0
    cost: int | None = None


@dataclass(frozen=True, slots=True)
class Made:
    """A decision at `at` of the router's clock, its view, and the flight that followed, if any."""

    at: float
    decision: Decision
    view: ClusterView
    flight: Flight | None = None

    @classmethod
    def of(cls, placed: Placed) -> Made:
        """The decision that placed a prompt, and its flight."""
        return cls(placed.flight.sent_at, placed.found.decision, placed.found.view, placed.flight)


@dataclass(frozen=True, slots=True)
class Ended:
    """The values that a Record is made of, all final.

    `arrived_at` and `ended_at` are of the router's clock, `arrived_unix_s` is the time of day.
    """

    request: Request
    rule: int
    config: str
    arrived_at: float
    arrived_unix_s: float
    ended_at: float
    outcome: str
    code: str
    trace_id: str | None = None
    error: str | None = None
    made: Sequence[Made] = field(default_factory=tuple)
    shared_keys: str = ""


def record_of(ended: Ended, *, is_brief: bool = False) -> Record:
    """The Record of a prompt that has ended; a brief one lacks keys, session and the views of its decisions."""
    request, last = ended.request, ended.made[-1].flight if ended.made else None
    try_of = _brief_try_of if is_brief else _try_of
    usage: Usage | None = None
    cost: int | None = None
    if last is not None and last.charged is not None:
        usage, cost = last.charged
    elif last is not None and last.answered:
        usage = last.usage or Usage(request.prompt_tokens, last.drawn_tokens)
    return Record(
        version=VERSION,
        time=round(ended.arrived_unix_s, 6),
        request=request.id,
        tenant=request.tenant,
        domain=request.domain,
        model=request.model,
        service_class=request.service_class,
        rank=request.rank,
        rule=ended.rule,
        config=ended.config,
        prompt_tokens=request.prompt_tokens,
        max_new_tokens=request.max_new_tokens,
        outcome=ended.outcome,
        code=ended.code,
        seconds=round(ended.ended_at - ended.arrived_at, 6),
        choices=request.sampling.choices,
        preemptible=request.preemptible,
        stream=request.stream,
        priority=request.priority,
        session=None if is_brief or request.session is None else _hashed(request.session),
        deadline_s=request.deadline_s,
        pools=request.pools,
        keys="" if is_brief else packed_keys(request.block_keys),
        tries=tuple(try_of(made, ended.arrived_at) for made in ended.made),
        ttft_s=_since(ended.arrived_at, last.first_at if last else None),
        completion_tokens=None if usage is None else usage.completion_tokens,
        cached_tokens=None if usage is None else usage.cached_tokens,
        cache_write_tokens=0 if usage is None else usage.cache_write_tokens,
        images=0 if usage is None else usage.images,
        backend_ms=0 if usage is None else usage.backend_ms,
        cost=cost,
        blended_tokens=usage.blended_tokens if usage is not None and usage.blended_tokens else None,
        trace_id=ended.trace_id,
        error=ended.error,
        likely_prompt_tokens=request.likely_prompt_tokens,
        shared_keys=ended.shared_keys,
        key_tokens=_key_tokens(request),
        ttft_target_s=None if request.promised is None else request.promised.ttft_s,
        tpot_target_s=None if request.promised is None else request.promised.tpot_s,
    )


def packed_keys(keys: Sequence[int]) -> str:
    """Every KEYS_EVERY_BLOCKS-th of `keys`, as base64 of little-endian uint64."""
    return _packed(keys[KEYS_EVERY_BLOCKS - 1 :: KEYS_EVERY_BLOCKS])


def packed_shared_keys(token_ids: bytes, model: str) -> str:
    """Keys of every KEY_TOKENS of `token_ids` (little-endian uint32), in the same form, of no cache domain.

    Prompts of `model` that begin alike have equal keys, although their tenants' domains differ.
    """
    parent, keys = root_key(model, ""), []
    whole = memoryview(token_ids)
    for start in range(0, len(whole) - _KEY_BYTES + 1, _KEY_BYTES):
        parent = xxh3_64_intdigest(whole[start : start + _KEY_BYTES], parent)
        keys.append(parent)
    return _packed(keys)


def unpacked_keys(packed: str) -> tuple[int, ...]:
    """The keys in a record's field. Raises ValueError if it is damaged."""
    keys = b64decode(packed, validate=True)
    if len(keys) % 8:
        raise ValueError("keys are not whole")
    return struct.unpack(f"<{len(keys) // 8}Q", keys)


def _packed(keys: Sequence[int]) -> str:
    return b64encode(struct.pack(f"<{len(keys)}Q", *keys)).decode()


def _key_tokens(request: Request) -> int:
    """Tokens for each kept key: of text an average, by the estimated length of the prompt."""
    if request.likely_prompt_tokens is None or not request.block_keys:
        return KEY_TOKENS
    return max(1, KEYS_EVERY_BLOCKS * request.prompt_tokens // len(request.block_keys))


def _fetch_of(fetch: Fetch) -> tuple[str, int, float]:
    return fetch.backend, fetch.tokens, round(fetch.seconds, 6)


def _brief_try_of(made: Made, arrived_at: float) -> Try:
    decision, flight = made.decision, made.flight
    return Try(
        policy=decision.policy,
        at_s=round(made.at - arrived_at, 6),
        backend=decision.chosen,
        first_s=_since(arrived_at, flight.first_at if flight else None),
        last_s=_since(arrived_at, flight.last_at if flight else None),
    )


def _try_of(made: Made, arrived_at: float) -> Try:
    decision, flight = made.decision, made.flight
    best = sorted(decision.scores, key=lambda pair: -pair[1])[:MOST_SEEN]
    views = {backend.name: backend for backend in made.view.backends}
    names = [name for name, _ in best] or list(views)[:MOST_SEEN]
    if decision.chosen in views and decision.chosen not in names:
        names[-1] = decision.chosen
    chosen = views.get(decision.chosen or "")
    return Try(
        policy=decision.policy,
        at_s=round(made.at - arrived_at, 6),
        backend=decision.chosen,
        predicted_ttft_s=_rounded(decision.predicted_ttft_s),
        backends=len(views) + decision.left_out,
        seen=tuple(_seen_of(views[name]) for name in names if name in views),
        scores=tuple((name, round(score, 6)) for name, score in best),
        dropped=decision.dropped[:MOST_DROPPED],
        first_s=_since(arrived_at, flight.first_at if flight else None),
        last_s=_since(arrived_at, flight.last_at if flight else None),
        left_out=decision.left_out,
        cache_tokens=None if chosen is None else chosen.cache_tokens,
        max_requests=None if chosen is None else chosen.max_requests,
        speed=None if chosen is None else _speed_of(chosen.latency),
        pace=(1.0, 1.0) if chosen is None else _pace_of(chosen, made.view),
        fetch=None if decision.fetch is None else _fetch_of(decision.fetch),
        prefill=None if decision.prefill is None else decision.prefill.backend,
    )


def _speed_of(latency: Latency) -> tuple[float, float, float, float, float, float]:
    prefill = _short(latency.fixed_s), _short(latency.token_s), _short(latency.pair_s)
    return (*prefill, _short(latency.step_s), _short(latency.sequence_s), _short(latency.context_s))


def _pace_of(chosen: BackendView, view: ClusterView) -> tuple[float, float]:
    """Its times of prefill and of decoding, in those of its pool's median backend (of two, the faster)."""
    peers = [backend.latency for backend in view.backends if backend.pool == chosen.pool]
    prefill = chosen.latency.token_s / (median_low(latency.token_s for latency in peers) or 1.0)
    decode = chosen.latency.step_s / (median_low(latency.step_s for latency in peers) or 1.0)
    return round(prefill, 2), round(decode, 2)


def _seen_of(view: BackendView) -> SeenBackend:
    return SeenBackend(
        backend=view.name,
        running=view.running,
        waiting=view.waiting,
        waiting_tokens=view.waiting_tokens,
        free_tokens=view.free_tokens,
        held_tokens=view.held_tokens,
        queue_s=round(view.queue_s, 6),
        adapter=view.adapter,
        age_s=_rounded(view.reported_s_ago),
    )


def _since(start: float, at: float | None) -> float | None:
    return None if at is None else round(at - start, 6)


def _short(seconds: float) -> float:
    return float(f"{seconds:.4g}")


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)


def _hashed(session: str) -> str:
    """A hash of the session's name, to tell sessions apart without their names: clients put e-mail addresses there."""
    return hashlib.blake2b(session.encode(), digest_size=8).hexdigest()
