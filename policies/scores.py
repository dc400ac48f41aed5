"""Scores: how well would each candidate do? One value in [0, 1] per candidate, None where it cannot tell."""

from __future__ import annotations

from collections.abc import Sequence

from xxhash import xxh3_64_intdigest

from policies.compose import Score
from policies.nouns import BackendView, Request
from policies.predict import predicted_ttft_s

NOTICEABLE_S = 0.02
"""Differences in TTFT far below this are noise of the measurement, and nobody feels them."""


def cache_overlap() -> Score:
    """Share of the prompt whose KV a candidate is believed to hold; None where nobody knows."""

    def score(request: Request, candidates: Sequence[BackendView]) -> list[float | None]:
        return [_share(backend.held_tokens, request.prompt_tokens) for backend in candidates]

    return score


def expected_ttft() -> Score:
    """The shortest expected time to first token among the candidates over a candidate's own: the fastest has 1.

    Expected is what the latency model of each says: its queue, and the prefill of what it does not hold at its own
    speed. So a held prefix is worth the seconds that it saves there.
    """

    def score(request: Request, candidates: Sequence[BackendView]) -> list[float | None]:
        seconds = [predicted_ttft_s(request, backend) for backend in candidates]
        fastest = min(seconds, default=0.0)
        return [(fastest + NOTICEABLE_S) / (one + NOTICEABLE_S) for one in seconds]

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


def _draw(label: str, backend: BackendView) -> float:
    # of independent u ** (1 / weight), the largest is each one's with a probability in proportion to its weight
    uniform = xxh3_64_intdigest(f"{label}\x00{backend.name}".encode()) / 2**64
    return float(uniform ** (1.0 / backend.weight)) if backend.weight > 0 else 0.0
