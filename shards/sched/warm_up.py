"""What an engine runs before its first real request, to know how fast it is. Torch-free."""

from __future__ import annotations

from shards.kv.keys import BLOCK_TOKENS

NEW_TOKENS = 4
"""Each of the prompts is answered by so many."""

_PROMPT_TOKENS = (BLOCK_TOKENS, 4 * BLOCK_TOKENS, 2 * BLOCK_TOKENS + 1, BLOCK_TOKENS)


def warm_up_prompts(context_tokens: int) -> tuple[int, ...]:
    """How long the prompts are that run one after the other, each alone, where `context_tokens` fit."""
    return tuple(min(wanted, context_tokens - NEW_TOKENS) for wanted in _PROMPT_TOKENS)
