"""A chunk: a document as a prompt of its own, so that its KV can be cached without its neighbours. Torch-free.

A chunk is a prefix in a domain of its own (`chunk_domain`): the first tokens of the prompt, which attention uses as a
sink, then the document, then padding up to whole blocks, which nothing before it sees. So its blocks are found, kept,
evicted, moved to other tiers and lent like those of any prompt, and are never found for one.
"""

from __future__ import annotations

from shards.kv.keys import BLOCK_TOKENS, TOKEN_BYTES, block_keys, chunk_domain, root_key

SINK_TOKENS = 4
"""First tokens of a prompt that stand before each of its chunks: most chat templates begin alike, and a network gives
much attention to the first token, whatever it is."""

LEAST_TOKENS = 32
"""Documents of fewer tokens are computed in place: a chunk takes at least a block."""


class DocumentChunk:
    """The document at `start` up to `stop` of a prompt, with the tokens of its chunk's blocks."""

    def __init__(self, prompt: bytes, start: int, stop: int) -> None:
        self.start, self.stop = start, stop
        self.sink_tokens = min(SINK_TOKENS, start)
        own = prompt[: self.sink_tokens * TOKEN_BYTES] + prompt[start * TOKEN_BYTES : stop * TOKEN_BYTES]
        self._token_ids = own + bytes(-len(own) % (BLOCK_TOKENS * TOKEN_BYTES))

    def __repr__(self) -> str:
        return f"DocumentChunk({self.start} to {self.stop}, {self.blocks} blocks)"

    @property
    def blocks(self) -> int:
        """The number of its blocks."""
        return len(self._token_ids) // (BLOCK_TOKENS * TOKEN_BYTES)

    @property
    def prompt(self) -> bytes:
        """The prompt that computes it. One more token follows its blocks: the last token of a prompt is not shared."""
        return self._token_ids + bytes(TOKEN_BYTES)

    def keys(self, model: str, domain: str) -> tuple[int, ...]:
        """The keys of its blocks, for the prompt's `model` and cache `domain`."""
        return block_keys(self._token_ids, root_key(model, chunk_domain(domain)))

    def block_tokens(self, index: int) -> bytes:
        """The tokens of its block `index`."""
        size = BLOCK_TOKENS * TOKEN_BYTES
        return self._token_ids[index * size : (index + 1) * size]
