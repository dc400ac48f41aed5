"""The diagnosis of a log: a pure function of its requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from router.operate.diagnose.hit_rate import HitReport, hit_report
from router.operate.diagnose.logged import LogContents, LoggedRequest
from router.operate.diagnose.nouns import Diagnosis
from router.operate.diagnose.targets import missed_targets


def diagnosis_of(
    contents: LogContents, *, cache_tokens: int | None = None, on_done: Callable[[], None] = lambda: None
) -> Diagnosis:
    """Why the hit rate, TTFT and TPOT of the requests in `contents` are what they are.

    Backends that do not report the size of their cache have `cache_tokens`; None: an infinite one. `on_done` is called
    for each try of a request.
    """
    requests = contents.requests
    known = _reported_sizes(requests)
    unknown = sorted({visit.backend for request in requests for visit in request.visits} - known.keys())
    sizes = known if cache_tokens is None else {**dict.fromkeys(unknown, cache_tokens), **known}
    report = hit_report(requests, sizes, on_done=on_done)
    return Diagnosis(
        requests=len(requests),
        first_s=requests[0].at_s,
        last_s=max(request.ended_s for request in requests),
        notes=tuple(_notes(contents, report, () if cache_tokens else unknown)),
        hit_rate=report.hit_rate,
        targets=missed_targets(requests, report.ideal),
    )


def _reported_sizes(requests: Sequence[LoggedRequest]) -> dict[str, int]:
    """Backend -> the tokens of its cache, as it reported last."""
    visits = [visit for request in requests for visit in request.visits]
    return {visit.backend: visit.cache_tokens for visit in visits if visit.cache_tokens is not None}


def _notes(contents: LogContents, report: HitReport, unsized: Sequence[str]) -> Iterator[str]:
    """What was left out, and what cannot be attributed, with the remedy."""
    requests = contents.requests
    if contents.skipped:
        yield f"{contents.skipped:,} of its lines could not be read: they are not JSON, a crash may have cut them off."
    if contents.left_out:
        yield f"Older requests were left out, {contents.left_out:,} in all: raise --requests to read them."
    if report.hit_rate is None:
        yield "No answered request has a number of cached tokens, so there is no hit rate."
    if report.silent:
        yield (
            f"{_counted(report.silent)} report no cached tokens and are left out of the hit rate. Either prefix "
            "caching is off there, or the engine does not report it (vLLM: --enable-prompt-tokens-details)."
        )
    if unsized:
        yield (
            f"{_listed(unsized)} do not report the size of their cache: losses by capacity and copies count as "
            "engine_eviction there. --cache-tokens sets the size."
        )
    without = sum(request.shared_keys is None for request in requests if request.visits)
    if without:
        yield (
            f"Requests without keys that all cache domains share: {without:,}. Their prompts have no token ids, or an "
            "older version wrote them. What another domain had cached of them is not in the ideal."
        )
    answered = [request for request in requests if request.ttft_s is not None]
    untimed = sum(request.visits[-1].speed is None for request in answered if request.visits)
    if untimed:
        yield (
            f"Requests without the backend's speed: {untimed:,}. An older version wrote them. Interference by decoding "
            "is not attributed, and slow_backend contains it."
        )
    if not any(request.ttft_target_s or request.tpot_target_s for request in requests):
        yield (
            "No request has a target: its class has none (classes.*.ttft_p95, tpot_p95), or an older version wrote the "
            "log. Missed targets are not attributed."
        )
    untold = sum(request.ttft_target_s is not None and request.ttft_s is None for request in requests)
    if untold:
        yield f"Requests with a TTFT target that ended without a first token: {untold:,}. They are not in the tables."


def _counted(backends: Mapping[str, int]) -> str:
    return _listed([f"{name} ({count:,} requests)" for name, count in sorted(backends.items())])


_MOST_NAMED = 5


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_MOST_NAMED])
    return f"{shown} and {len(names) - _MOST_NAMED} others" if len(names) > _MOST_NAMED else shown
