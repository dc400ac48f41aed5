"""What a request would find at a backend: the one prediction that scores, admission, Retry-After and on_miss share."""

from __future__ import annotations

from policies.nouns import BackendView, Request


def uncached_tokens(request: Request, backend: BackendView) -> int:
    """Prompt tokens that `backend` would compute, at least one; where nobody knows what it holds, it holds nothing."""
    return max(1, request.prompt_tokens - (backend.held_tokens or 0))


def predicted_ttft_s(request: Request, backend: BackendView) -> float:
    """Seconds from sending `request` to `backend` now to its first token: its queue, then what is not cached there."""
    uncached = uncached_tokens(request, backend)
    return backend.latency.ttft_s(uncached, request.prompt_tokens - uncached, queue_s=backend.queue_s)
