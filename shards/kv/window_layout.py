"""The division of KV memory between blocks and the pages of layers with a window. Torch-free."""

from __future__ import annotations

from typing import NamedTuple

from shards.kv.keys import BLOCK_TOKENS

LEAST_CHUNK_TOKENS = 2048
"""Chunks of prompts are cut to this, or to one window, as their pages exist all at once."""

_USUAL_TOKENS = 4096
"""Length of the sequences for which pages and blocks end at the same time; blocks limit longer ones."""

_MOST_FREE_BLOCKS = 1 << 18
"""Blocks of a network in which all layers have a window: they take no memory, but each is an entry of the map."""


class KvWindow(NamedTuple):
    """The layers of a network with a window: the `tokens` that a token sees there, and the bytes of 64 positions."""

    tokens: int
    page_bytes: int

    def pages(self, tokens: int) -> int:
        """The most pages that one sequence needs to compute `tokens` tokens in one step."""
        return -(-(self.tokens + tokens - 2) // BLOCK_TOKENS) + 1

    def first_seen(self, position: int) -> int:
        """The first block that a token at `position` sees."""
        return max(0, position - self.tokens + 1) // BLOCK_TOKENS


class KvLayout(NamedTuple):
    """`blocks` blocks. With a `window` its layers are not in them but in `pages`, and chunks have `chunk_tokens`."""

    blocks: int
    window: KvWindow | None = None
    pages: int = 0
    chunk_tokens: int = 0


def divide(
    blocks: int,
    window: KvWindow,
    *,
    block_bytes: int,
    context_tokens: int,
    max_running: int,
    chunk_tokens: int,
    unit_tokens: int = BLOCK_TOKENS,
) -> KvLayout:
    """The layout in the memory of `blocks` blocks of all layers, `block_bytes` each; undivided if that has more room.

    Prompts of up to `context_tokens` are computed in chunks of up to `chunk_tokens`, in whole units.
    """
    rest_bytes = block_bytes - window.page_bytes
    decoding, context_blocks = window.pages(1), -(-context_tokens // BLOCK_TOKENS)
    if rest_bytes:
        usual_blocks = min(context_blocks, _USUAL_TOKENS // BLOCK_TOKENS)
        pages = _pages_beside(blocks, rest_bytes, window, usual_blocks, max_running)
        divided = (blocks * block_bytes - pages * window.page_bytes) // rest_bytes
    else:
        pages = blocks
        divided = min(max(1, min(max_running, pages // decoding)) * context_blocks, _MOST_FREE_BLOCKS)
    # no sequence takes more than a quarter of the pages while it is prefilled, if that is one unit
    room_tokens = (pages // 4 - decoding) * BLOCK_TOKENS // unit_tokens * unit_tokens
    chunk_tokens = min(chunk_tokens, max(LEAST_CHUNK_TOKENS, window.tokens), max(unit_tokens, room_tokens))
    if divided <= blocks or window.pages(chunk_tokens) > pages:
        return KvLayout(blocks)
    return KvLayout(divided, window, pages, chunk_tokens)


def _pages_beside(blocks: int, rest_bytes: int, window: KvWindow, usual_blocks: int, max_running: int) -> int:
    """The pages in the memory of `blocks` whole blocks, beside blocks of `rest_bytes`."""
    decoding = window.pages(1)
    memory = blocks * (rest_bytes + window.page_bytes)
    by_length = memory * decoding // (usual_blocks * rest_bytes + decoding * window.page_bytes)
    return min(blocks, max(by_length, min(2 * max_running * decoding, blocks // 2)))
