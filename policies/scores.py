"""Scores: how well would each candidate do? One value in [0, 1] per candidate, None where it cannot tell."""

from __future__ import annotations

from collections.abc import Sequence

from xxhash import xxh3_64_intdigest

from policies.compose import Score
from policies.filters import uncached_tokens
from policies.nouns import BackendView, Request

NOTICEABLE_S = 0.02
"""Differences in TTFT far below this are noise of the measurement, and nobody feels them."""

ASSUMED_S_PER_TOKEN = 1e-4
"""Prefill cost while no candidate has measured its own; what matters then is that it is the same for all."""


def cache_overlap() -> Score:
    """Share of the prompt whose KV a candidate is believed to hold; None where nobody knows."""

    def score(request: Request, candidates: Sequence[BackendView]) -> list[float | None]:
        return [_share(backend.held_tokens, request.prompt_tokens) for backend in candidates]

    return score


def expected_ttft() -> Score:
    """The shortest expected time to first token among the candidates over a candidate's own: the fastest has 1.

    Expected are the prompt tokens that wait there and those of this prompt that it does not hold, at its own prefill
    cost. None for one that has not measured its cost, unless nobody has: then all are taken to be equally fast.
    """

    def score(request: Request, candidates: Sequence[BackendView]) -> list[float | None]:
        assumed = None if any(backend.prefill_s_per_token for backend in candidates) else ASSUMED_S_PER_TOKEN
        seconds = [_ttft_s(request, backend, assumed) for backend in candidates]
        fastest = min((time_s for time_s in seconds if time_s is not None), default=0.0)
        return [None if s is None else (fastest + NOTICEABLE_S) / (s + NOTICEABLE_S) for s in seconds]

    return score


def balance() -> Score:
    """How idle a candidate is.

    Where all candidates tell how many requests they run at once: the share of that which is unused. Else the load of
    the idlest over its own, both counted in requests per weight: the idlest has 1.
    """

    def score(_: Request, candidates: Sequence[BackendView]) -> list[float | None]:
        limits = [backend.max_requests for backend in candidates if backend.max_requests]
        loads = [backend.running + backend.waiting for backend in candidates]
        if len(limits) == len(candidates):
            return [1.0 - min(1.0, load / limit) for load, limit in zip(loads, limits, strict=True)]
        shares = [(load + 1) / backend.weight for load, backend in zip(loads, candidates, strict=True)]
        return [min(shares) / share for share in shares]

    return score


def turn() -> Score:
    """Takes turns by the hash of the request's id: each candidate is best for its weight's share of requests.

    Even in the long run and not strictly alternating, which needs a counter that all routers share.
    """
    return lambda request, candidates: [_draw(request.id, backend) for backend in candidates]


def session() -> Score:
    """The same candidate is best for one session, as long as it is there; who leaves moves only its own sessions.

    Without a session: for one tenant and first block of the prompt. Source: rendezvous hashing, Thaler and Ravishankar,
    1998.
    """

    def score(request: Request, candidates: Sequence[BackendView]) -> list[float | None]:
        label = request.session or f"{request.tenant}\x00{request.block_keys[0] if request.block_keys else ''}"
        return [_draw(f"{request.domain}\x00{label}", backend) for backend in candidates]

    return score


def _share(held_tokens: int | None, prompt_tokens: int) -> float | None:
    return None if held_tokens is None else min(1.0, held_tokens / max(1, prompt_tokens))


def _ttft_s(request: Request, backend: BackendView, assumed: float | None) -> float | None:
    cost = backend.prefill_s_per_token or assumed
    return cost and (backend.waiting_tokens + uncached_tokens(request, backend)) * cost


def _draw(label: str, backend: BackendView) -> float:
    # of independent u ** (1 / weight), the largest is each one's with a probability in proportion to its weight
    uniform = xxh3_64_intdigest(f"{label}\x00{backend.name}".encode()) / 2**64
    return float(uniform ** (1.0 / backend.weight)) if backend.weight > 0 else 0.0
