"""The decision log's record of one prompt: sizes, keys and times, never text. `docs/decision-log.md` explains it."""

from __future__ import annotations

import hashlib
import struct
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from policies.nouns import BackendView, ClusterView, Decision, Request, Usage
from router.call.bid import Placed
from router.fleet.cluster.flights import Flight

VERSION = 1
"""Version of the record. A field may be added without a new version; no field changes its meaning."""

KEYS_EVERY_BLOCKS = 8
"""Every eighth block key is kept, one for 512 tokens: keys are chained, so each stands for those before it."""

MOST_SEEN = 16
"""Most backends kept of one view, those with the best scores first."""

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
    trace_id: str | None = None
    error: str | None = None
    likely_prompt_tokens: tuple[int, int] | None = None


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


def record_of(ended: Ended) -> Record:
    """The Record of a prompt that has ended."""
    request, last = ended.request, ended.made[-1].flight if ended.made else None
    usage: Usage | None = None
    if last is not None and last.answered:
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
        session=None if request.session is None else _hashed(request.session),
        deadline_s=request.deadline_s,
        pools=request.pools,
        keys=packed_keys(request.block_keys),
        tries=tuple(_try_of(made, ended.arrived_at) for made in ended.made),
        ttft_s=_since(ended.arrived_at, last.first_at if last else None),
        completion_tokens=None if usage is None else usage.completion_tokens,
        cached_tokens=None if usage is None else usage.cached_tokens,
        trace_id=ended.trace_id,
        error=ended.error,
        likely_prompt_tokens=request.likely_prompt_tokens,
    )


def packed_keys(keys: Sequence[int]) -> str:
    """Every KEYS_EVERY_BLOCKS-th of `keys`, as base64 of little-endian uint64."""
    kept = keys[KEYS_EVERY_BLOCKS - 1 :: KEYS_EVERY_BLOCKS]
    return b64encode(struct.pack(f"<{len(kept)}Q", *kept)).decode()


def _try_of(made: Made, arrived_at: float) -> Try:
    decision, flight = made.decision, made.flight
    best = sorted(decision.scores, key=lambda pair: -pair[1])[:MOST_SEEN]
    views = {backend.name: backend for backend in made.view.backends}
    names = [name for name, _ in best] or list(views)[:MOST_SEEN]
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
    )


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


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)


def _hashed(session: str) -> str:
    """A hash of the session's name, to tell sessions apart without their names: clients put e-mail addresses there."""
    return hashlib.blake2b(session.encode(), digest_size=8).hexdigest()
