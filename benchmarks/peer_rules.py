"""The rules of other routers for placement, written here from their documentation and source, with their own constants.

Each reads this router's state, which is fresher than that of some peers: figures compare decisions, not programs.

- SGLang's and SMG's `cache_aware` (2026-08), also that of vllm-router: if the best holder's load is above 1.5 times the
  mean and 64 over it, the least loaded; else the longest match if that is more than 0.3 of the prompt; else the least
  loaded.
- vllm-router's `consistent_hash`: the same backend for a session, or for a tenant and its first block.
- Dynamo's KV router: least of blocks to prefill there, less what is held, plus blocks that decode there.
- llm-d's scorers: 3 for the share of the prompt that is held, 2 for a short queue relative to the candidates', 2 for
  the share of free KV.
- The production stack's `loadaware`: share that is held, less load over the mean.
- Least requests, and in turn.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from policies import compose, scores
from policies.catalogue import builtin_catalogue, usual_filters
from policies.compose import Policy, Score, WeightedScore
from policies.nouns import BackendView, Request
from simulation.speed import Machine

BLOCK = 64


def load(backend: BackendView) -> int:
    """Requests there, from all routers."""
    return backend.running + backend.waiting


def held(backend: BackendView) -> int:
    """Tokens of the prompt that the backend is believed to hold."""
    return backend.held_tokens or 0


def ranked(values: Sequence[float]) -> list[float | None]:
    """The best gets 1, the worst 0."""
    low, high = min(values), max(values)
    return [(value - low) / (high - low) if high > low else 1.0 for value in values]


def sglang() -> Score:
    """SMG model_gateway/src/policies, `cache_aware`, with the defaults of its command line."""

    def score(request: Request, candidates: Sequence[BackendView]) -> list[float | None]:
        loads = [load(backend) for backend in candidates]
        mean, most = statistics.fmean(loads), max(map(held, candidates))
        if most > 0.3 * request.prompt_tokens:
            # of backends that hold as much, the least loaded
            best = min((backend for backend in candidates if held(backend) == most), key=load)
            if not (load(best) > 1.5 * mean and load(best) > mean + 64):
                return [float(backend is best) for backend in candidates]
        return ranked([-float(there) for there in loads])

    return score


def dynamo(kv_tokens: int) -> Score:
    """Dynamo's KV router: `overlap_score_weight` 1, temperature 0, blocks of 64."""

    def score(request: Request, candidates: Sequence[BackendView]) -> list[float | None]:
        incoming = request.prompt_tokens / BLOCK

        def cost(backend: BackendView) -> float:
            prefill = max(0.0, backend.waiting_tokens / BLOCK + incoming - held(backend) / BLOCK)
            decode = (kv_tokens - (backend.free_tokens or 0)) / BLOCK
            return prefill + decode + incoming

        return ranked([-cost(backend) for backend in candidates])

    return score


def llm_d(kv_tokens: int) -> Score:
    """llm-d's prefix, queue and KV scorers, 3 : 2 : 2, as in its guides."""

    def score(request: Request, candidates: Sequence[BackendView]) -> list[float | None]:
        prefix = [min(1.0, held(backend) / max(1, request.prompt_tokens)) for backend in candidates]
        queue = ranked([-float(backend.waiting) for backend in candidates])
        free = [(backend.free_tokens or 0) / kv_tokens for backend in candidates]
        return [
            (3 * cached + 2 * (short or 0.0) + 2 * room) / 7
            for cached, short, room in zip(prefix, queue, free, strict=True)
        ]

    return score


def production_stack() -> Score:
    """production-stack `loadaware`: matched / prompt - (load - mean) / max(1, mean)."""

    def score(request: Request, candidates: Sequence[BackendView]) -> list[float | None]:
        loads = [load(backend) for backend in candidates]
        mean = statistics.fmean(loads)
        return [
            held(backend) / max(1, request.prompt_tokens) - (there - mean) / max(1.0, mean)
            for backend, there in zip(candidates, loads, strict=True)
        ]

    return score


def least_requests() -> Score:
    return lambda _, candidates: ranked([-float(load(backend)) for backend in candidates])


def former() -> Policy:
    """Our default until 2026-11: shares of TTFT and KV, and the first backend with room."""
    parts = (
        WeightedScore("expected_ttft", 1.0, scores.expected_ttft()),
        WeightedScore("cache_thrift", 4.0, scores.cache_thrift()),
        WeightedScore("balance", 1.0, scores.balance()),
    )
    return Policy("former default", usual_filters(), parts, compose.best(), allows_shortlist=True)


def sent_at_once(name: str, score: Score) -> Policy:
    """A peer's policy: it sends at once, and the backend queues."""
    kept = (("healthy", compose.healthy()), ("serves_model", compose.serves_model()))
    return Policy(
        name, (*kept, ("fits_context", compose.fits_context())), (WeightedScore(name, 1.0, score),), compose.best()
    )


def policies(machine: Machine) -> dict[str, Policy]:
    """All compared policies, by their names in the table."""
    peers = {
        "SMG, SGLang: cache_aware": sglang(),
        "vllm-router: consistent_hash": scores.session(),
        "Dynamo: KV cost": dynamo(machine.kv_tokens),
        "llm-d: scorers 3:2:2": llm_d(machine.kv_tokens),
        "production stack: loadaware": production_stack(),
        "least requests": least_requests(),
        "in turn": scores.turn(),
    }
    ours = {"Pointsman: default": builtin_catalogue().policies["default"], "Pointsman: former default": former()}
    return {**ours, **{name: sent_at_once(name, score) for name, score in peers.items()}}
