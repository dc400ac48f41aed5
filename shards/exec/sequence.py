"""One choice of a request while the engine computes it. Torch-free."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import Protocol

import numpy as np
import numpy.typing as npt

from shards.exec.drafter import Drafter
from shards.exec.model_drafter import ModelDrafter
from shards.exec.prompt_drafter import PromptDrafter
from shards.exec.request import Request
from shards.exec.skips import Skips, Span
from shards.kv.keys import BLOCK_TOKENS, TOKEN_BYTES
from shards.kv.prefix import CachedBlock
from shards.kv.raw_block import BlockLabel
from shards.kv.table import BlockTable, blocks_for
from shards.nouns import Cause, Finished, FinishReason
from shards.sched.drafts import MOST_DRAFTED, Prospect
from shards.sched.plan import Work
from shards.sched.room import Claim


class Find(Protocol):
    """Finds blocks outside the memory of this shard."""

    def __call__(
        self, path: Items[CachedBlock], tokens_of: Callable[[int], bytes], /, *, limit: int, domain: str
    ) -> list[BlockLabel]:
        """The labels of the blocks that continue `path`, up to `limit` blocks in total."""
        ...


class Sequence:
    """One choice of a request: `computed_tokens` of prompt and output have KV; the known tokens lead.

    `arrival` numbers all sequences of the engine. The parts of its prompt that are computed, cached and shared end at
    multiples of `unit_tokens`. A unit larger than a block promises equal bits, so drawn tokens are then not cached. Its
    blocks become free `lag` steps after its last token was drawn.

    Behind `output` there may be `unseen` tokens that a device has drawn and the host has not collected: they count as
    known, but have no value yet. It is protected from preemption for a while from `spared_s` on, when it started or
    resumed. While it waits, `match` is the cached prefix that it would share, or its table is parked.

    Where its documents' KV came from chunks it `skips` positions, of which `blended_tokens` were computed before this
    request; nothing behind the first of them is exact, cached or shared. Its first `settled` documents were looked up,
    and those that are `unmeasured` are computed in place.

    If it `may_draft`, drafters guess its next tokens, from its first drawn one on: prompt lookup, and the
    `model_drafter` if there is a draft model.
    """

    def __init__(
        self,
        request: Request,
        choice: int,
        *,
        arrival: int,
        table: BlockTable,
        unit_tokens: int = BLOCK_TOKENS,
        lag: int = 0,
        may_draft: bool = False,
        model_drafter: ModelDrafter | None = None,
    ) -> None:
        self.request, self.choice, self.arrival, self.table = request, choice, arrival, table
        self.unit_tokens, self._lag, self._may_draft = unit_tokens, lag, may_draft
        self._prompt_tokens = request.submission.prompt_tokens
        self.output: list[int] = []
        self.unseen = 0
        self.computed_tokens = 0
        self.cached_tokens = 0
        self.overtaken = 0
        self.match: list[CachedBlock] = []
        self.spared_s: float | None = None
        self.skips = Skips()
        self.blended_tokens = self.settled = 0
        self.unmeasured: list[int] = []
        self.model_drafter = model_drafter
        self._drafters: tuple[Drafter, ...] = ()

    def __repr__(self) -> str:
        return (
            f"Sequence({self.request.key!r}/{self.choice}: {self.computed_tokens} computed, {len(self.output)} drawn, "
            f"{self.table!r})"
        )

    @property
    def seen_tokens(self) -> int:
        """The length of the whole prompt, arrived or not, plus the collected tokens."""
        return self._prompt_tokens + len(self.output)

    @property
    def known_tokens(self) -> int:
        """The length of the whole prompt, arrived or not, plus the drawn tokens."""
        return self._prompt_tokens + len(self.output) + self.unseen

    @property
    def has_drawn(self) -> bool:
        """Whether its first token has been drawn, collected or not."""
        return bool(self.output) or self.unseen > 0

    @property
    def is_decoding(self) -> bool:
        """Whether computing its next token yields one more."""
        drawn = len(self.output) + self.unseen
        return drawn > 0 and self.computed_tokens == self._prompt_tokens + drawn - 1

    @property
    def is_startable(self) -> bool:
        """Whether there are tokens to compute that may be computed. A sequence that has begun to draw is not paused."""
        return self.has_drawn or (bool(self.request.prompt) and not self.request.is_held)

    @property
    def ready_tokens(self) -> int:
        """The number of tokens that can be computed now.

        A unit is computed at once or not at all, so that a unit that turns out to be cached can still be shared.
        """
        drawn = len(self.output) + self.unseen
        if drawn:
            # the last token may be drawn already: then it only remains to wait for it
            is_full = drawn == self.request.submission.max_new_tokens
            return 0 if is_full else self._left(self._prompt_tokens + drawn)
        if self.request.is_held:
            return 0
        arrived = self.request.arrived_tokens
        computable = arrived if self.request.is_whole else arrived - arrived % self.unit_tokens
        return max(0, self._left(computable))

    @property
    def shareable_blocks(self) -> int:
        """The most blocks that may come from the cache. The last token is always computed: its logits are needed."""
        arrived, known = self.request.arrived_tokens, self.seen_tokens
        if self.unit_tokens > BLOCK_TOKENS:
            known = self._prompt_tokens
        elif self.request.is_whole:
            arrived = known
        return min(arrived, known - 1) // self.unit_tokens * (self.unit_tokens // BLOCK_TOKENS)

    @property
    def storable_tokens(self) -> int:
        """The number of computed tokens that may be cached: none with a value that the host does not know."""
        prompt_tokens = self._prompt_tokens
        most = min(self.computed_tokens, self.seen_tokens)
        if self.skips.start is not None:
            most = min(most, self.skips.start)
        return most if self.unit_tokens == BLOCK_TOKENS else min(most, prompt_tokens - prompt_tokens % self.unit_tokens)

    @property
    def drafter(self) -> Drafter | None:
        """The drafter with the likeliest next guess, and prompt lookup if both are equal: its guesses take no time."""
        best = None
        for drafter in self._drafters:
            if drafter.has_guess and (best is None or drafter.chance > best.chance):
                best = drafter
        return best

    @property
    def prospect(self) -> Prospect | None:
        """The expected gain of a draft, if the sequence decodes and has a guess.

        A draft takes no new block: it ends where the block of the certain token ends.
        """
        drafter = self.drafter
        if drafter is None or not self.is_decoding:
            return None
        most = min(MOST_DRAFTED, self.left_tokens - 1, BLOCK_TOKENS - 1 - self.computed_tokens % BLOCK_TOKENS)
        # the first guess is then for the token that only the device knows, and the others depend on it
        later = drafter.later_chance
        first = drafter.chance * later**self.unseen
        return Prospect(self.arrival, self.computed_tokens, first, later, most, drafter.guess_s)

    @property
    def left_tokens(self) -> int:
        """The most tokens that it may still draw."""
        return self.request.submission.max_new_tokens - len(self.output) - self.unseen

    def append(self, token_id: int) -> None:
        """Append the drawn token `token_id`, which is now known."""
        self.output.append(token_id)
        if self._may_draft:
            if not self._drafters:
                model = () if self.model_drafter is None else (self.model_drafter,)
                self._drafters = (PromptDrafter(self.request.index), *model)
            for drafter in self._drafters:
                drafter.note(token_id)

    def claim(self) -> Claim:
        """The blocks that it holds and may need, once it runs."""
        submission = self.request.submission
        final_tokens = submission.prompt_tokens + submission.max_new_tokens - 1
        is_steady = self.is_decoding and self.table.is_landed
        windows = self.table.pool.windows
        pages = 0 if windows is None else windows.claim(final_tokens, is_decoding=self.is_decoding)
        return Claim(self.table.ids, self.known_tokens, final_tokens, is_steady, lag=self._lag, pages=pages)

    def look_up(self) -> list[CachedBlock]:
        """The cached blocks that it would share if it started now, in whole units."""
        limit, domain = self.shareable_blocks, self.table.domain
        self.table.pool.prefix.extend_path(self.match, self.block_tokens, limit=limit, domain=domain)
        return self.match[: self._readable(self.match)]

    def share(self) -> int:
        """Share the cached blocks that continue it, if it is at a unit boundary; returns the number of tokens."""
        if self.computed_tokens % self.unit_tokens or self.is_decoding or self.skips:
            return 0
        limit = self.shareable_blocks
        if self.unit_tokens > BLOCK_TOKENS:
            limit = self._whole_units_found(limit)
        found = self.table.follow(self.block_tokens, limit=limit) * BLOCK_TOKENS
        self.computed_tokens += found
        self.cached_tokens += found
        return found

    def seek(self, find: Find) -> list[BlockLabel]:
        """The labels that `find` has of blocks that continue it in whole units, as far as there is room on the device;
        none between two unit boundaries.
        """
        pool, table = self.table.pool, self.table
        if self.computed_tokens % self.unit_tokens or self.is_decoding or not table.is_chained or self.skips:
            return []
        path, limit = list(table.path), self.shareable_blocks
        if len(path) * BLOCK_TOKENS != self.computed_tokens:
            return []
        pool.prefix.extend_path(path, self.block_tokens, limit=limit, domain=table.domain)
        most = min(limit, len(table.path) + pool.available_for(table.domain))
        labels = find(path, self.block_tokens, limit=most, domain=table.domain)
        return labels[: max(0, self._whole(len(path) + len(labels)) - len(path))]

    def start_over(self) -> None:
        """Drop its KV. Drawn tokens are kept, and are computed again as if they were part of the prompt."""
        self.table.release()
        self.table = BlockTable(self.table.pool, self.table.domain, rank=self.table.rank)
        self.computed_tokens = self.cached_tokens = 0
        self.skips, self.blended_tokens, self.settled, self.unmeasured = Skips(), 0, 0, []
        self.match = []

    def skip(self, spans: Items[Span], *, is_reused: bool) -> None:
        """Skip `spans`, where its table has the KV already; `is_reused` if it was computed before this request."""
        before = self.skips.tokens
        self.skips.add(spans)
        if is_reused:
            self.blended_tokens += self.skips.tokens - before
        self.advance(self.computed_tokens)

    def advance(self, computed_tokens: int) -> None:
        """Record that the first `computed_tokens` tokens have KV, or will have before anything else is computed."""
        self.computed_tokens = self.skips.behind(computed_tokens) if self.skips else computed_tokens

    def spans(self, tokens: int) -> list[Span]:
        """The positions of the next `tokens` tokens to compute."""
        start = self.computed_tokens
        return list(self.skips.computed(start, tokens)) if self.skips else [(start, start + tokens)]

    def work(self, rank: int, *, drafted_tokens: int = 0) -> Work:
        """Its description for the scheduler, if it has ready tokens; `rank` is the effective one."""
        if self.is_decoding:
            done = self.computed_tokens
            guess_s = self.drafter.guess_s if drafted_tokens and self.drafter is not None else 0.0
            return Work(
                *(self.arrival, rank, self.arrival, done, 1, 0, True), drafted_tokens=drafted_tokens, guess_s=guess_s
            )
        ready = self.ready_tokens
        block, domain = self.computed_tokens // BLOCK_TOKENS, self.table.domain
        next_block = None
        may_share = self.table.is_chained and not self.skips
        if may_share and ready >= self.unit_tokens and not self.computed_tokens % BLOCK_TOKENS:
            # the key alone names the block: on a collision with another key, this sequence waits one step in vain
            next_block = self.table.pool.prefix.key(self.table.tip, self.block_tokens(block), domain=domain)
        return Work(
            id=self.arrival,
            rank=rank,
            arrival=self.arrival,
            # as if all that is skipped stood before it: each further token attends to it
            computed_tokens=self.computed_tokens + self.skips.tokens_from(self.computed_tokens),
            ready_tokens=ready,
            rest_tokens=self._left(self.known_tokens),
            is_decoding=False,
            slice_tokens=self.request.prefill_slice,
            next_block=next_block,
            may_follow=next_block is not None and block < self.shareable_blocks,
        )

    def block_tokens(self, index: int) -> bytes:
        """The tokens of block `index`, all of which are known: from the prompt, the output or both."""
        prompt_tokens, start = self._prompt_tokens, index * BLOCK_TOKENS
        if start + BLOCK_TOKENS <= prompt_tokens:
            return self.request.block_tokens(index)
        drawn = self.output[max(0, start - prompt_tokens) : start + BLOCK_TOKENS - prompt_tokens]
        return bytes(self.request.prompt[start * TOKEN_BYTES :]) + np.array(drawn, dtype="<u4").tobytes()

    def token_ids(self, start: int, stop: int) -> npt.NDArray[np.uint32] | list[int]:
        """Its tokens `start` up to `stop`, of prompt and output; 0 for a token that the host does not know."""
        prompt_tokens = self._prompt_tokens
        if start == self.seen_tokens:
            return [0] * (stop - start)
        if start >= prompt_tokens:
            return self.output[start - prompt_tokens : stop - prompt_tokens]
        prompt = self.request.token_ids(start, min(stop, prompt_tokens))
        if stop <= prompt_tokens:
            return prompt
        return np.concatenate([prompt, np.array(self.output[: stop - prompt_tokens], dtype="<u4")])

    def finished(
        self,
        reason: FinishReason,
        *,
        stop: str = "",
        by_token: bool = False,
        message: str = "",
        cause: Cause | None = None,
    ) -> Finished:
        """The report of its end. All choices of a request report the same cached tokens."""
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
            blended_tokens=self.request.blended_tokens,
            by_token=by_token,
        )

    def check(self) -> None:
        """Assert that its blocks hold exactly the computed tokens."""
        self.table.check()
        known = self.request.arrived_tokens + len(self.output) + self.unseen
        assert 0 <= self.unseen <= 1, "more than one step is in flight"
        assert self.computed_tokens <= known, "more was computed than is known"
        assert self.cached_tokens <= self.computed_tokens, "more was cached than computed"
        assert self.skips.stop < self.known_tokens, "the last known token is skipped"
        assert self.blended_tokens <= self.skips.tokens, "more was blended than skipped"
        held_tokens = 0 if self.table.is_parked else max(self.computed_tokens, self.skips.stop)
        assert len(self.table) == blocks_for(held_tokens), "blocks and computed tokens disagree"
        assert len(self.table) <= self.request.peak_blocks, "it holds more than its peak"
        if self.table.is_chained and not self.table.is_parked:
            cached = self.storable_tokens // BLOCK_TOKENS
            assert [block.token_ids for block in self.table.path] == [self.block_tokens(i) for i in range(cached)], (
                "a shared block holds other tokens"
            )

    def _left(self, stop: int) -> int:
        """The number of its tokens before `stop` that are still to be computed."""
        return stop - self.computed_tokens - self.skips.tokens_from(self.computed_tokens)

    def _whole_units_found(self, limit: int) -> int:
        """The number of cached blocks, up to `limit`, that form whole units and have room on the device."""
        path, pool, domain = list(self.table.path), self.table.pool, self.table.domain
        pool.prefix.extend_path(path, self.block_tokens, limit=limit, domain=domain)
        here = sum(cached.block is not None for cached in path)
        restorable = max(0, pool.available_for(domain) - here)
        return self._readable(path[: min(len(path), here + restorable)])

    def _readable(self, path: list[CachedBlock]) -> int:
        """The number of blocks of `path`, in whole units, behind which it could go on."""
        windows = self.table.pool.windows
        unit = self.unit_tokens // BLOCK_TOKENS
        return self._whole(len(path)) if windows is None else windows.reach(path, unit=unit)

    def _whole(self, blocks: int) -> int:
        return blocks - blocks % (self.unit_tokens // BLOCK_TOKENS)
