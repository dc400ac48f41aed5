"""One choice of a request while the engine computes it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shards.exec.request import Request
from shards.exec.sampling import Sampler
from shards.exec.stop import StopStrings
from shards.kv.keys import BLOCK_TOKENS, TOKEN_BYTES
from shards.kv.prefix import CachedBlock
from shards.kv.table import BlockTable, blocks_for
from shards.nouns import Cause, Finished, FinishReason
from shards.sched.plan import Work


class Sequence:
    """One choice of a request: `computed_tokens` of prompt and output have KV, chasing all that are known.

    `arrival` numbers all sequences of the engine. While it waits, `match` is the cached prefix that it would share.
    """

    def __init__(
        self,
        request: Request,
        choice: int,
        *,
        arrival: int,
        table: BlockTable,
        draws: tuple[Sampler, StopStrings | None],
    ) -> None:
        self.request, self.choice, self.arrival, self.table = request, choice, arrival, table
        self.sampler, self.stops = draws
        self.output: list[int] = []
        self.computed_tokens = 0
        self.cached_tokens = 0
        self.overtaken = 0
        self.match: list[CachedBlock] = []

    def __repr__(self) -> str:
        return (
            f"Sequence({self.request.key!r}/{self.choice}: {self.computed_tokens} computed, {len(self.output)} drawn, "
            f"{self.table!r})"
        )

    @property
    def outstanding_blocks(self) -> int:
        """How many more blocks it may yet want, at most."""
        return self.request.peak_blocks - len(self.table)

    @property
    def ready_tokens(self) -> int:
        """How many tokens could be computed now."""
        if self.output:
            return self.request.submission.prompt_tokens + len(self.output) - self.computed_tokens
        return 0 if self.request.is_paused else max(0, self.request.computable_tokens - self.computed_tokens)

    def work(self) -> Work:
        """It as the scheduler sees it."""
        request, ready = self.request, self.ready_tokens
        if self.output:
            return Work(self.arrival, request.rank, self.arrival, self.computed_tokens, ready, 0, True)
        block, domain = self.computed_tokens // BLOCK_TOKENS, request.submission.domain
        next_block = None
        if self.table.is_chained and ready >= BLOCK_TOKENS:
            # the key alone names the block: if another's collides with it, this one waits a step for nothing
            next_block = self.table.pool.prefix.key(self.table.tip, request.block_tokens(block), domain=domain)
        return Work(
            id=self.arrival,
            rank=request.rank,
            arrival=self.arrival,
            computed_tokens=self.computed_tokens,
            ready_tokens=ready,
            rest_tokens=request.submission.prompt_tokens - self.computed_tokens,
            is_decoding=False,
            slice_tokens=request.prefill_slice,
            next_block=next_block,
            may_follow=next_block is not None and block < request.matchable_blocks,
        )

    def draws_after(self, tokens: int) -> bool:
        """Are the logits of the last of the next `tokens` wanted? They are if nothing known lies behind it."""
        known = self.request.submission.prompt_tokens + len(self.output)
        return self.computed_tokens + tokens == known

    def block_tokens(self, index: int) -> bytes:
        """The tokens of block `index`, all of which are known; prompt or output or both."""
        prompt_tokens, start = self.request.submission.prompt_tokens, index * BLOCK_TOKENS
        if start + BLOCK_TOKENS <= prompt_tokens:
            return self.request.block_tokens(index)
        drawn = self.output[max(0, start - prompt_tokens) : start + BLOCK_TOKENS - prompt_tokens]
        return bytes(self.request.prompt[start * TOKEN_BYTES :]) + np.array(drawn, dtype="<u4").tobytes()

    def token_ids(self, tokens: int) -> npt.NDArray[np.uint32] | list[int]:
        """The next `tokens` to compute."""
        start, prompt_tokens = self.computed_tokens, self.request.submission.prompt_tokens
        if start >= prompt_tokens:
            return self.output[start - prompt_tokens : start - prompt_tokens + tokens]
        return self.request.token_ids(start, start + tokens)

    def finished(
        self, reason: FinishReason, *, stop: str = "", message: str = "", cause: Cause | None = None
    ) -> Finished:
        """The report of its end. All choices of a request name the same cached tokens."""
        return Finished(
            key=self.request.key,
            choice=self.choice,
            reason=reason,
            prompt_tokens=self.request.submission.prompt_tokens,
            cached_tokens=self.request.cached_tokens,
            output_tokens=len(self.output),
            stop=stop,
            message=message,
            cause=cause,
        )

    def check(self) -> None:
        """Prove that its blocks hold exactly what was computed."""
        self.table.check()
        known = self.request.arrived_tokens + len(self.output)
        assert self.computed_tokens <= known, "more was computed than is known"
        assert self.cached_tokens <= self.computed_tokens, "more was cached than computed"
        assert len(self.table) == blocks_for(self.computed_tokens), "blocks and computed tokens disagree"
        assert self.outstanding_blocks >= 0, "it holds more than its peak"
        if self.table.is_chained:
            full = self.computed_tokens // BLOCK_TOKENS
            assert [one.token_ids for one in self.table.path] == [self.block_tokens(i) for i in range(full)], (
                "a shared block holds other tokens"
            )
