"""Which requests can be divided: one backend computes the prompt, and another one answers. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from policies.nouns import BackendView, Capability, Request
from policies.predict import will_fit

_TOGETHER = frozenset(
    {
        *(Capability.EMBEDDINGS, Capability.RERANK, Capability.MEDIA, Capability.PROMPT_LOGPROBS),
        *(Capability.CONTINUES_TOKENS, Capability.CONTINUES_TEXT),
    }
)
"""What a backend can only do with a prompt that it computes itself."""


def is_divisible(request: Request) -> bool:
    """Can one backend compute the prompt of `request` and another one answer it?"""
    return request.sampling.choices == 1 and _TOGETHER.isdisjoint(request.needs)


def may_get_prefill(
    request: Request, backend: BackendView, backends: Iterable[BackendView], avoiding: Collection[str] = ()
) -> bool:
    """Has `backend`, which computes no prompts, one of `backends` that does so for it?"""
    return any(
        other.pool == backend.prefill and other.name not in avoiding and may_prefill(request, other)
        for other in backends
    )


def may_prefill(request: Request, backend: BackendView) -> bool:
    """Can `backend` compute the prompt of `request` for another one, and is it well?"""
    is_well = backend.healthy and not backend.draining and backend.may_take != 0
    return is_well and request.model in backend.models and will_fit(request, backend)
