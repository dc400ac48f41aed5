"""A request inside the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from shards.exec.chunking import Chunking, ChunkKey
from shards.exec.lookup import PromptIndex
from shards.kv.keys import BLOCK_TOKENS, TOKEN_BYTES
from shards.nouns import Submission
from shards.sched.limits import peak_blocks

if TYPE_CHECKING:
    from shards.lora.adapter import LoadedAdapter

_BLOCK_BYTES = BLOCK_TOKENS * TOKEN_BYTES


class Request:
    """The arrived part of one prompt and its progress. `open_choices` of its choices have not ended.

    `key` is the caller's name for it. If it `is_chunk`, it computes a chunk of another request's document, so that no
    report has it.

    `computed_tokens` of the prompt have KV in the sequence that is furthest; in the first one, `cached_tokens` were
    found in the cache and `blended_tokens` were taken from chunks that had been computed before. `documents` may be
    taken from chunks; None means that all is exact. `rank`, `prefill_slice` and `is_paused` may be changed at any time.
    `awaits_grammar` until its grammar is compiled, and `awaits_adapter` until its `adapter` is loaded; its KV then
    belongs to `domain`, which other adapters do not have. `arrived_s` is its arrival on the engine's clock; its
    sequences were preempted `preemptions` times.
    """

    def __init__(self, submission: Submission, *, arrived_s: float = 0.0) -> None:
        self.submission, self.arrived_s = submission, arrived_s
        self.key = submission.key
        self.is_chunk = isinstance(submission.key, ChunkKey)
        self.rank = submission.rank
        self.prefill_slice = submission.prefill_slice
        self.is_paused = False
        self.awaits_grammar = submission.sampling.grammar is not None
        self.awaits_adapter = bool(submission.adapter)
        self.adapter: LoadedAdapter | None = None
        self.domain = submission.domain
        self.prompt = bytearray()
        self.open_choices = submission.choices
        self.computed_tokens = 0
        self.cached_tokens = self.blended_tokens = 0
        self.documents: Chunking | None = None
        self.preemptions = 0
        self._index: PromptIndex | None = None

    def __repr__(self) -> str:
        wanted = self.submission.prompt_tokens
        return (
            f"Request({self.key!r}: {self.arrived_tokens}/{wanted} arrived, {self.computed_tokens} computed, "
            f"{self.open_choices} open)"
        )

    @property
    def arrived_tokens(self) -> int:
        """The number of prompt tokens that have arrived."""
        return len(self.prompt) // TOKEN_BYTES

    @property
    def is_held(self) -> bool:
        """Whether it is paused, or waits for its grammar, adapter or chunks; then none of it may be computed."""
        awaits_chunks = self.documents is not None and not self.documents.is_ready
        return self.is_paused or self.awaits_grammar or self.awaits_adapter or awaits_chunks

    @property
    def is_whole(self) -> bool:
        """Whether the whole prompt has arrived."""
        return self.arrived_tokens == self.submission.prompt_tokens

    @property
    def peak_blocks(self) -> int:
        """The most blocks that one of its sequences can ever hold."""
        return peak_blocks(self.submission.prompt_tokens, self.submission.max_new_tokens)

    @property
    def index(self) -> PromptIndex:
        """The index of its prompt, which has arrived completely; made on first use."""
        if self._index is None:
            self._index = PromptIndex(self.token_ids(0, self.submission.prompt_tokens))
        return self._index

    def block_tokens(self, index: int) -> bytes:
        """The tokens of the prompt's block `index`, which has arrived."""
        return bytes(self.prompt[index * _BLOCK_BYTES : (index + 1) * _BLOCK_BYTES])

    def token_ids(self, start: int, stop: int) -> npt.NDArray[np.uint32]:
        """Prompt tokens `start` up to `stop`, as a copy, because the prompt may still grow."""
        return np.frombuffer(bytes(self.prompt[start * TOKEN_BYTES : stop * TOKEN_BYTES]), dtype="<u4")
