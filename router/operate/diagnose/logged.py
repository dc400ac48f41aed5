"""The requests of decision logs, with only what a diagnosis needs: some hundred bytes each."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from sys import intern

from policies.errors import InvalidRequest
from policies.learning.cost import Latency
from router.operate.telemetry.decision_reader import records_of
from router.operate.telemetry.decision_record import Record, Try, unpacked_keys

USUAL_MOST = 100_000
"""Default number of requests that are read."""


@dataclass(frozen=True, slots=True)
class Visit:
    """One backend that a request was sent to. Times are seconds since 1970.

    `held` has the tokens of the prompt that backends were believed to hold, if any; `dropped` the filter that kept out
    a backend. `is_whole`: the log has all backends that were there then. `speed` is the backend's latency model then,
    with `pace` the times of prefill and decoding in those of its pool's median backend. It runs `max_requests` at
    once, if it reports that.
    """

    backend: str
    sent_s: float
    first_s: float | None
    last_s: float | None
    held: Mapping[str, int]
    dropped: Mapping[str, str]
    is_whole: bool
    queue_s: float
    cache_tokens: int | None
    max_requests: int | None
    predicted_ttft_s: float | None
    speed: Latency | None
    pace: tuple[float, float]


@dataclass(frozen=True, slots=True)
class LoggedRequest:
    """One prompt of the log. `visits` are in their order; the last one answered, if any did.

    Each of `keys` and of `shared_keys` stands for `key_tokens` of the prompt and all before them; the latter are of no
    cache domain, and None if the log lacks them. `cached_tokens` is None without an answer. It ended at `ended_s`,
    in seconds since 1970. It may use `pools`; None: any.
    """

    id: str
    at_s: float
    tenant: str
    service_class: str
    prompt_tokens: int
    new_tokens: int
    cached_tokens: int | None
    ended_s: float
    keys: tuple[int, ...]
    shared_keys: tuple[int, ...] | None
    key_tokens: int
    ttft_s: float | None
    ttft_target_s: float | None
    tpot_target_s: float | None
    visits: tuple[Visit, ...]
    pools: tuple[str, ...] | None = None

    @property
    def tpot_s(self) -> float | None:
        """Mean seconds of each further token of an answer with at least two."""
        if not self.visits or self.new_tokens < 2:
            return None
        first_s, last_s = self.visits[-1].first_s, self.visits[-1].last_s
        return None if first_s is None or last_s is None else (last_s - first_s) / (self.new_tokens - 1)


@dataclass(frozen=True, slots=True)
class LogContents:
    """The requests of a log in order of arrival. `skipped` lines were not JSON; `left_out` requests were too old."""

    requests: Sequence[LoggedRequest]
    skipped: int
    left_out: int


def read_logs(
    paths: Iterable[Path],
    *,
    most: int = USUAL_MOST,
    on_read: Callable[[int], None] = lambda _: None,
    last_bytes: int | None = None,
) -> LogContents:
    """The last `most` requests of the decision logs at `paths`, or those in the `last_bytes` of each.

    `on_read` gets the number of bytes of each line.

    Several files are those of several routers or processes in front of the same backends, or older parts of one log.
    Raises InvalidRequest that names the file, and the line if one is not of a decision log.
    """
    kept: deque[LoggedRequest] = deque(maxlen=most)
    skipped: list[int] = []
    count = 0
    named = ""
    for path in paths:
        named = f"{named}, {path}" if named else str(path)
        for number, record in records_of(path, on_read=on_read, on_torn=skipped.append, last_bytes=last_bytes):
            try:
                kept.append(logged_request(record))
            except ValueError as error:
                hint = "was the log edited? see docs/decision-log.md"
                raise InvalidRequest(f"{path}:{number}: its keys are damaged", hint=hint) from error
            count += 1
    if not kept:
        why = f"none of its {len(skipped)} lines is JSON" if skipped else "it is empty"
        hint = "server.decision_log or --decisions has a router write one"
        raise InvalidRequest(f"{named} has no request: {why}", hint=hint)
    return LogContents(sorted(kept, key=lambda request: request.at_s), len(skipped), count - len(kept))


def logged_request(record: Record) -> LoggedRequest:
    """What a diagnosis needs of `record`. Raises ValueError if its keys are damaged."""
    return LoggedRequest(
        id=record.request,
        at_s=record.time,
        tenant=intern(record.tenant),
        service_class=intern(record.service_class),
        prompt_tokens=max(1, record.prompt_tokens),
        new_tokens=(record.completion_tokens or 0) // record.choices,
        cached_tokens=record.cached_tokens,
        ended_s=record.time + record.seconds,
        keys=unpacked_keys(record.keys),
        shared_keys=unpacked_keys(record.shared_keys) if record.shared_keys or not record.keys else None,
        key_tokens=max(1, record.key_tokens),
        ttft_s=record.ttft_s,
        ttft_target_s=record.ttft_target_s,
        tpot_target_s=record.tpot_target_s,
        visits=tuple(_visit(tried, record.time) for tried in record.tries if tried.backend is not None),
        pools=record.pools,
    )


def _visit(tried: Try, at_s: float) -> Visit:
    backend = intern(tried.backend or "")
    chosen = next((seen for seen in tried.seen if seen.backend == backend), None)
    return Visit(
        backend=backend,
        sent_s=at_s + tried.at_s,
        first_s=None if tried.first_s is None else at_s + tried.first_s,
        last_s=None if tried.last_s is None else at_s + tried.last_s,
        held={intern(seen.backend): seen.held_tokens for seen in tried.seen if seen.held_tokens},
        dropped={intern(name): intern(why) for name, why in tried.dropped},
        is_whole=tried.backends <= len(tried.seen) + len(tried.dropped),
        queue_s=0.0 if chosen is None else chosen.queue_s,
        cache_tokens=tried.cache_tokens,
        max_requests=tried.max_requests,
        predicted_ttft_s=tried.predicted_ttft_s,
        speed=None if tried.speed is None else _latency(tried.speed),
        pace=tried.pace,
    )


def _latency(speed: tuple[float, float, float, float, float, float]) -> Latency:
    fixed_s, token_s, pair_s, step_s, sequence_s, context_s = speed
    return Latency(fixed_s, token_s, pair_s, step_s=step_s, sequence_s=sequence_s, context_s=context_s)
