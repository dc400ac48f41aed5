"""Scores: how suitable is each candidate? One value in [0, 1] per candidate, None if it is unknown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from xxhash import xxh3_64_intdigest

from policies.compose import Score
from policies.learning.cost import prefill_work
from policies.nouns import BackendView, Request
from policies.part import Part
from policies.predict import MARGINAL_COST, marginal_cost, predicted_ttft_s, uncached_tokens

NOTICEABLE_S = 0.02
"""Differences in TTFT far below this are measurement noise, and clients do not notice them."""

_WORTH = 4.0
"""Value of a held prompt, in multiples of the seconds of its prefill: the request waits for them, so do requests behind
it at another backend, and so do later requests with prefixes that it evicts there."""


def cache_overlap() -> Score:
    """Share of the prompt with KV that a candidate is believed to hold; None if unknown."""

    def score(request: Request, candidates: Sequence[BackendView]) -> list[float | None]:
        return [_share(backend.held_tokens, request.prompt_tokens) for backend in candidates]

    return score


def expected_ttft() -> Score:
    """The shortest expected time to first token among the candidates divided by a candidate's own: the fastest has 1.

    The expected time comes from each candidate's latency model: its queue, and the uncached prefill at its own
    speed. So a held prefix is worth the seconds that it saves there.
    """

    def score(request: Request, candidates: Sequence[BackendView]) -> list[float | None]:
        seconds = [predicted_ttft_s(request, backend) for backend in candidates]
        fastest = min(seconds, default=0.0)
        return [(fastest + NOTICEABLE_S) / (expected + NOTICEABLE_S) for expected in seconds]

    return score


def cache_thrift() -> Score:
    """How little a placement costs the caches: 1 if the candidate holds the whole prompt and its queue is shortest.

    A candidate must compute and keep the part that it does not hold, and that evicts as many tokens of other prompts,
    which may be requested again. Half of that cost is the same everywhere. The other half grows with the tokens that
    the candidate computed lately, relative to the size of its cache: if they are many, evicted blocks are young and
    more likely to be requested again. So a prompt stays with its prefix, and new prefixes are spread so that all caches
    keep prompts equally long.

    A prompt stays with its prefix only as long as that pays: a queue that is longer than the shortest by `_WORTH` times
    the prefill time of the whole prompt costs as much as computing the prompt anew.

    Cache sizes count if all candidates report theirs; otherwise caches count as equal per weight.
    """

    def score(request: Request, candidates: Sequence[BackendView]) -> list[float | None]:
        known = [backend.cache_tokens for backend in candidates if backend.cache_tokens]
        sizes: Sequence[float] = known if len(known) == len(candidates) else [each.weight for each in candidates]
        # the prompt's length is added so that the first few prompts do not give extreme values
        churn = [
            (backend.fresh_tokens + request.prompt_tokens) / size if size > 0 else 0.0
            for backend, size in zip(candidates, sizes, strict=True)
        ]
        most, shortest_s = max(churn, default=0.0) or 1.0, min([backend.queue_s for backend in candidates], default=0.0)
        prompt_tokens = max(1, request.prompt_tokens)
        whole = prefill_work(prompt_tokens)
        scores: list[float | None] = []
        for backend, churned in zip(candidates, churn, strict=True):
            share = uncached_tokens(request, backend) / prompt_tokens
            computed = share * (0.5 + 0.5 * churned / most)
            waited = (backend.queue_s - shortest_s) / (_WORTH * backend.latency.work_s(whole) + 1e-9)
            scores.append(1.0 - min(1.0, computed + waited))
        return scores

    return score


def balance() -> Score:
    """How idle a candidate is.

    If all candidates report how many requests they run at once: the unused share of that. Else the load of
    the idlest divided by its own, both in requests per weight: the idlest has 1.
    """

    def score(_: Request, candidates: Sequence[BackendView]) -> list[float | None]:
        used = [(each.running + each.waiting) / each.max_requests for each in candidates if each.max_requests]
        if len(used) == len(candidates):
            return [1.0 - min(1.0, share) for share in used]
        loads = [(backend.running + backend.waiting + 1) / backend.weight for backend in candidates]
        idlest = min(loads)
        return [idlest / load for load in loads]

    return score


def turn() -> Score:
    """Takes turns by the hash of the request's id: each candidate is best for its weight's share of requests.

    Even in the long run but not strictly alternating, which would need a counter that all routers share.
    """
    return lambda request, candidates: [_draw(request.id, backend) for backend in candidates]


def session() -> Score:
    """The same candidate is best for one session as long as it exists; a removed backend moves only its own sessions.

    Without a session: for one tenant and first block of the prompt. Source: rendezvous hashing, Thaler and Ravishankar,
    1998.
    """

    def score(request: Request, candidates: Sequence[BackendView]) -> list[float | None]:
        label = request.session or f"{request.tenant}\x00{request.block_keys[0] if request.block_keys else ''}"
        return [_draw(f"{request.domain}\x00{label}", backend) for backend in candidates]

    return score


def _share(held_tokens: int | None, prompt_tokens: int) -> float | None:
    return None if held_tokens is None else min(1.0, held_tokens / max(1, prompt_tokens))


def _draw(label: str, backend: BackendView) -> float:
    # with independent u, u ** (1 / weight) is largest for each with a probability proportional to its weight
    uniform = xxh3_64_intdigest(f"{label}\x00{backend.name}".encode()) / 2**64
    return float(uniform ** (1.0 / backend.weight)) if backend.weight > 0 else 0.0


SCORES: Mapping[str, Part[Score]] = MappingProxyType(
    {
        "expected_ttft": Part(expected_ttft, allows_shortlist=True),
        "balance": Part(balance, allows_shortlist=True),
        "cache_thrift": Part(cache_thrift, allows_shortlist=True),
        MARGINAL_COST: Part(marginal_cost, allows_shortlist=True),
        "cache_overlap": Part(cache_overlap, allows_shortlist=True),
        "turn": Part(turn),
        "session": Part(session),
    }
)
"""The scores that the SLA file can name."""
