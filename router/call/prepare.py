"""What a request asks for, as its call needs it: whether it is allowed, its facts, and the room of its answer."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from policies.errors import InvalidRequest
from policies.media_urls import why_refused
from policies.nouns import Capability, Sampling, Tenant
from policies.rules import Facts
from policies.sla.config import Config
from router.ask import Ask
from router.call.lookup import LookedUp
from router.call.prompts import beyond_context
from router.fleet.cluster.served_model import ServedModel
from router.text.tokenize import Tokens

UNKNOWN_ROOM_TOKENS = 4096
"""The answer that is planned for where neither client nor backend says how long it may be."""


def require_allowed(ask: Ask, tenant: Tenant, config: Config) -> None:
    """Raise InvalidRequest if an engine must not fetch one of the URLs in `ask`, or if the requests of `tenant` must
    name their end user and this one does not."""
    if tenant.needs_user and not ask.user:
        hint = "send `user`, or `metadata.user_id` in Anthropic's format"
        raise InvalidRequest(f"requests of tenant '{tenant.name}' must name their end user", hint=hint, param="user")
    for url in ask.media_urls:
        reason = why_refused(url, config.server.media_hosts)
        if reason is not None:
            hint = "send the bytes in a data: URL, or have the operator allow the host in server.media_hosts"
            raise InvalidRequest(f"the URL '{url[:80]}' {reason}", hint=hint, param="messages")


def facts_of(ask: Ask, prompts: Sequence[LookedUp], *, tenant: Tenant, model: ServedModel) -> Facts:
    """The facts of this call for rules; its longest prompt speaks for all. Raises ContextExceeded."""
    longest = prompts[0] if len(prompts) == 1 else max(prompts, key=lambda prompt: prompt.tokens.count)
    return Facts(
        tenant,
        # rules and tenants go by the name that was asked for, which may be an alias
        ask.model,
        prompt_tokens=longest.tokens.count,
        max_new_tokens=room(ask, longest.tokens, model),
        uncached_tokens=max(1, longest.uncached_tokens),
        priority=ask.priority,
        headers=ask.headers,
        metadata=ask.metadata,
        stream=ask.stream,
    )


def wishes(ask: Ask, tokens: Tokens) -> tuple[frozenset[Capability], Sampling]:
    """What a backend must be able to do for `ask`, and how it is to draw: calls that must be made shape the answer."""
    return ask.needs | {Capability.STRUCTURED_OUTPUT}, replace(ask.sampling, grammar=tokens.calls)


def room(ask: Ask, tokens: Tokens, model: ServedModel) -> int:
    """How many tokens the answer to `tokens` may have. Raises ContextExceeded if prompt and answer do not fit.

    A length that is only estimated is never refused here: the backend knows better. Then an answer of no given length
    gets what even a long prompt leaves, and where that is next to nothing, a part of what the lower bound leaves.
    """
    wanted = ask.max_new_tokens or ask.usual_new_tokens
    if model.context_tokens is None:
        return wanted or UNKNOWN_ROOM_TOKENS
    left = model.context_tokens - tokens.count
    if tokens.least is not None:
        longest = tokens.count if tokens.likely is None else tokens.likely[1]
        left = max(model.context_tokens - longest, (model.context_tokens - tokens.least) // 8)
    elif left < (ask.max_new_tokens or 1):
        raise beyond_context(tokens.count, ask, model, left)
    return ask.max_new_tokens or max(1, min(left, wanted or left))
