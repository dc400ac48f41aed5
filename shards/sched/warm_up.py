"""The requests that an engine runs before its first real one, to learn its speed. Torch-free."""

from __future__ import annotations

from shards.kv.keys import BLOCK_TOKENS

NEW_TOKENS = 4
"""Tokens of the answer to each prompt."""

_PROMPT_TOKENS = (BLOCK_TOKENS, 4 * BLOCK_TOKENS, 2 * BLOCK_TOKENS + 1, BLOCK_TOKENS)


def warm_up_prompts(context_tokens: int) -> tuple[int, ...]:
    """The lengths of the prompts, within `context_tokens`. They run one after the other, each alone."""
    return tuple(min(wanted, context_tokens - NEW_TOKENS) for wanted in _PROMPT_TOKENS)
