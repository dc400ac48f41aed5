"""A small model that guesses the next tokens of answers, which the large one then verifies."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch

from shards.before_loading import require_same_tokens
from shards.exec.batch import Batch, Row
from shards.exec.drawing import Sample
from shards.exec.model_drafter import MOST_LAG, DraftPace, ModelDrafter
from shards.exec.network import DrawingNetwork
from shards.exec.runner import Tokens, placed
from shards.exec.sampling import Sampler, sample
from shards.exec.sequence import Sequence
from shards.kv.keys import BLOCK_TOKENS
from shards.kv.pool import BlockPool, OutOfBlocks
from shards.kv.table import BlockTable, blocks_for
from shards.model import Model
from shards.nouns import SamplingParams, Submission
from shards.sched.cost import CostModel, StepShape, prefill_shape
from shards.sched.drafts import FEW_ROWS_ON_DEVICE, MOST_DRAFTED
from shards.shortage import gib, memory_for

log = logging.getLogger(__name__)

CHUNK_TOKENS = 512
"""Most prompt tokens that it computes at a time, of all answers: a GPU has graphs for such steps."""

_KEPT_UNUSED = 0.98
"""A step without any guess takes so much from the predicted time of the next: what was measured in a bad moment must
not count for good."""

_WARM_TOKENS = 2 * BLOCK_TOKENS
_WARM_STEPS = 4


class _Asked(NamedTuple):
    """`tokens` guesses are wanted behind the known tokens of an answer, of which the last ones, `new`, have no KV."""

    drafter: ModelDrafter
    new: Tokens
    tokens: int


class DraftModel:
    """`model` with KV of its own for `kv_bytes`, which answers share as they share that of the large model.

    An answer for which there is no room is not followed. A step takes its guesses right before it is computed. If the
    network fails, nothing is guessed any more, and answers go on without. Raises ValueError if `kv_bytes` hold no
    block, NotEnoughMemory if the system has too little.
    """

    def __init__(self, model: Model, kv_bytes: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.model, self._network, self._clock = model, model.network, clock
        blocks = kv_bytes // model.network.block_bytes
        if blocks < 1:
            least = gib(model.network.block_bytes)
            raise ValueError(f"{gib(kv_bytes)} hold no KV block of the draft model, which takes {least}; give it more")
        with memory_for(f"{gib(kv_bytes)} of the draft model's KV", hint="give it less"):
            self._network.allocate(blocks)
        self._device = self._network if isinstance(self._network, DrawingNetwork) else None
        self.pool = BlockPool(blocks, model=model.name)
        self._cost = CostModel()
        self._pace = DraftPace()
        self._has_failed = False
        self._unused = 1.0
        self._tokens = self._network.vocabulary
        self.spent_s = 0.0
        """Seconds that all of its work took since the start."""

    def __repr__(self) -> str:
        return f"DraftModel({self.model.name}: {self.pool!r}, {self._pace!r}, {self._cost!r})"

    def bind(self, model: Model) -> None:
        """Guess for `model`. Raises ValueError if it has other tokens."""
        require_same_tokens(self.model.tokens, model.tokens)
        self._tokens = min(self._network.vocabulary, model.vocabulary)

    def prepare(self, rows: int) -> None:
        """Compile the steps of up to `rows` answers if a device computes them, and measure some steps."""
        if self._device is not None:
            self._device.prepare(rows, FEW_ROWS_ON_DEVICE)
        tokens = min(_WARM_TOKENS, self._network.context_tokens - MOST_DRAFTED, self.pool.size * BLOCK_TOKENS)
        sampler = Sampler(SamplingParams(), seed=0, stop_token_ids=frozenset(), vocabulary=self._network.vocabulary)
        for number in range(_WARM_STEPS):
            if number == 1:
                # the first pass of a process takes several times as long as the second
                self._cost = CostModel()
            table = BlockTable(self.pool, "")
            drafter = ModelDrafter(DraftPace(), sampler, table, prompt_tokens=tokens - MOST_LAG, most_tokens=tokens)
            table.grow(tokens)
            self._compute([drafter], [[0] * (tokens - MOST_LAG)])
            drafter.computed_tokens = drafter.known_tokens - 1
            self._guess([_Asked(drafter, [0], MOST_LAG)])
            drafter.release()

    def drafter(self, submission: Submission, sampler: Sampler) -> ModelDrafter:
        """A drafter for one choice of a request; `sampler` draws its tokens."""
        vocabulary, params = self._network.vocabulary, submission.sampling
        own = Sampler(
            replace(
                params,
                top_logprobs=None,
                logit_bias={token: value for token, value in params.logit_bias.items() if token < vocabulary},
            ),
            seed=sampler.seed,
            stop_token_ids=frozenset(token for token in sampler.stop_token_ids if token < vocabulary),
            vocabulary=vocabulary,
            drawn=submission.answered_tokens,
        )
        table = BlockTable(self.pool, submission.domain, rank=submission.rank)
        return ModelDrafter(
            self._pace,
            own,
            table,
            prompt_tokens=submission.prompt_tokens,
            most_tokens=0 if self._has_failed else self._network.context_tokens,
        )

    def expect(self, sequences: Iterable[Sequence]) -> None:
        """Predict what a guess takes if it is made for all of `sequences` side by side; once in each step."""
        contexts = [
            drafter.known_tokens
            for sequence in sequences
            if (drafter := sequence.model_drafter) is not None and drafter.may_guess
        ]
        rows, context = max(1, len(contexts)), sum(contexts)
        self._unused *= _KEPT_UNUSED
        self._pace.guess_s = self._predict_s(StepShape(rows, 0.0, context)) / rows

    def catch_up_s(self, drafter: ModelDrafter) -> float:
        """The predicted time until `drafter`, which is behind, can guess."""
        lag = drafter.known_tokens - drafter.computed_tokens
        return self._unused * self._cost.marginal_s(prefill_shape(drafter.computed_tokens, lag))

    def guess(self, wanted: Mapping[Sequence, int]) -> None:
        """Let the drafter of each sequence have so many guesses; fewer, or none, if there is no room for them."""
        asked: list[_Asked] = []
        for sequence, tokens in sorted(wanted.items(), key=lambda item: -item[1]):
            drafter = sequence.model_drafter
            if drafter is None or not drafter.lacks(tokens):
                continue
            new = sequence.token_ids(drafter.computed_tokens, drafter.known_tokens)
            if self._understands(drafter, new) and self._grow(drafter, drafter.known_tokens + tokens - 1):
                asked.append(_Asked(drafter, new, tokens))
        if not asked:
            return
        for each, guesses in zip(asked, self._attempt(lambda: self._guess(asked)) or (), strict=False):
            each.drafter.guess(guesses)
        self._store(wanted)

    def catch_up(self, sequences: Iterable[Sequence], within_s: float) -> None:
        """Compute the KV of answers that lack it, first come, first served, for about `within_s` seconds."""
        drafters: dict[Sequence, ModelDrafter] = {}
        chunks: list[Tokens] = []
        shape, under_way = StepShape(), set[Hashable]()
        for sequence in sequences:
            drafter = sequence.model_drafter
            # of several choices, one computes the prompt
            if drafter is None or sequence.request.key in under_way or not self._begin(drafter, sequence):
                continue
            left = CHUNK_TOKENS - shape.tokens
            start = drafter.computed_tokens
            tokens = min(left - (start + left) % BLOCK_TOKENS, drafter.known_tokens - start)
            while tokens > 0 and self._predict_s(shape + prefill_shape(start, tokens)) > within_s:
                # down to the end of the block before
                tokens -= (start + tokens) % BLOCK_TOKENS or BLOCK_TOKENS
            if tokens <= 0:
                break
            new = sequence.token_ids(start, start + tokens)
            if self._understands(drafter, new) and self._grow(drafter, start + tokens):
                drafters[sequence] = drafter
                chunks.append(new)
                shape += prefill_shape(start, tokens)
                under_way.add(sequence.request.key)
        if not drafters or self._attempt(lambda: self._compute(list(drafters.values()), chunks)) is None:
            return
        for drafter, new in zip(drafters.values(), chunks, strict=True):
            drafter.computed_tokens += len(new)
        self._store(drafters)

    def clear(self, domain: str | None, drafters: Iterable[ModelDrafter]) -> None:
        """Forget all cached blocks, or those of `domain`; `drafters` go on with the blocks that they hold."""
        self.pool.clear(domain)
        for drafter in drafters:
            if domain in (None, drafter.table.domain):
                drafter.table.unchain()

    def check(self, drafters: Iterable[ModelDrafter]) -> None:
        """Assert that exactly these drafters hold blocks, and the invariants of each."""
        for drafter in (known := list(drafters)):
            drafter.check()
        self.pool.check([drafter.table.ids for drafter in known])

    def _predict_s(self, shape: StepShape) -> float:
        return self._unused * self._cost.predict_s(shape)

    def _attempt(self, work: Callable[[], list[list[int]]]) -> list[list[int]] | None:
        """What `work` returns; None if the network failed, as it is never asked again then."""
        if self._has_failed:
            return None
        started_s = self._clock()
        try:
            return work()
        except Exception:
            log.exception("the draft model %s failed and is not used any more", self.model.name)
            self._has_failed = True
            return None
        finally:
            self.spent_s += self._clock() - started_s

    def _understands(self, drafter: ModelDrafter, token_ids: Tokens) -> bool:
        """Whether all tokens are of its vocabulary. If not, `drafter` ends."""
        if self._has_failed or (len(token_ids) and max(token_ids) >= self._network.vocabulary):
            drafter.end()
            return False
        return True

    def _begin(self, drafter: ModelDrafter, sequence: Sequence) -> bool:
        """Share what is cached of `sequence`. False if there is no room for the whole of it."""
        table = drafter.table
        if not len(table) and self.pool.available < blocks_for(drafter.known_tokens + MOST_DRAFTED):
            return False
        if len(table) * BLOCK_TOKENS == drafter.computed_tokens:
            limit = (drafter.known_tokens - 1) // BLOCK_TOKENS
            drafter.computed_tokens += BLOCK_TOKENS * table.follow(sequence.block_tokens, limit=limit)
        return True

    def _grow(self, drafter: ModelDrafter, tokens: int) -> bool:
        """Make room for `tokens` positions. If there is none, `drafter` gives back what it has."""
        try:
            drafter.table.grow(tokens)
        except OutOfBlocks:
            drafter.release()
            return False
        return True

    def _store(self, sequences: Iterable[Sequence]) -> None:
        """Cache the full blocks of `sequences`."""
        for sequence in sequences:
            drafter = sequence.model_drafter
            if drafter is not None:
                drafter.table.store(sequence.block_tokens, computed_tokens=drafter.computed_tokens)
        # no router is told of this cache
        self.pool.prefix.drain_events()

    def _guess(self, asked: list[_Asked]) -> list[list[int]]:
        """The guesses of `asked`, which want fewer and fewer tokens, in one step for each token."""
        guesses: list[list[int]] = [[] for _ in asked]
        started_s, shape = self._clock(), StepShape()
        steps = asked[0].tokens
        ticket: Hashable = None
        for ahead in range(steps):
            going = [each for each in asked if each.tokens > ahead]
            batch = self._first(going) if not ahead else self._next(going, ahead, guesses)
            samplers = [each.drafter.sampler.ahead(each.drafter.drawn + ahead) for each in going]
            shape += StepShape(len(batch.token_ids), 0.0, sum(row.context_tokens for row in batch.rows))
            if self._device is None:
                _append(guesses, sample(self._network.forward(batch), samplers))
                continue
            # one step ahead: its tokens are on the device
            before, ticket = ticket, self._device.submit(batch, [sampler.drawing(0) for sampler in samplers])
            if before is not None:
                _append(guesses, self._device.collect(before))
        if self._device is not None and ticket is not None:
            _append(guesses, self._device.collect(ticket))
        mean = StepShape(round(shape.tokens / steps), 0.0, round(shape.decode_context / steps))
        self._cost.observe(mean, (self._clock() - started_s) / steps, steps=steps)
        self._unused = 1.0
        return [_sound(tokens, self._tokens) for tokens in guesses]

    def _first(self, asked: list[_Asked]) -> Batch:
        """The step behind which the first guesses are drawn."""
        token_ids: list[Tokens] = []
        rows: list[Row] = []
        wanted: list[int] = []
        at = 0
        # a device has graphs for so many rows of one token
        is_apart = self._device is not None and sum(len(each.new) for each in asked) <= FEW_ROWS_ON_DEVICE
        for drafter, new, _ in asked:
            if not is_apart:
                token_ids.append(new)
                rows.append(_row(drafter, at, len(new), drafter.known_tokens))
            else:
                first = drafter.known_tokens - len(new) + 1
                token_ids += [[int(token)] for token in new]
                rows += [_row(drafter, at + ahead, 1, first + ahead) for ahead in range(len(new))]
            at += len(new)
            wanted.append(at - 1)
        return _a_batch(rows, token_ids, wanted)

    def _next(self, asked: list[_Asked], ahead: int, guesses: list[list[int]]) -> Batch:
        """The step that reads the `ahead`-th guesses; on a device only that knows them."""
        rows = [_row(each.drafter, at, 1, each.drafter.known_tokens + ahead) for at, each in enumerate(asked)]
        places = range(len(asked))
        if self._device is not None:
            return _a_batch(rows, [[0]] * len(asked), places, ahead=tuple((at, at) for at in places))
        # the guess behind a row without sound logits is never used
        return _a_batch(rows, [[max(0, guesses[at][-1])] for at in places], places)

    def _compute(self, drafters: list[ModelDrafter], chunks: list[Tokens]) -> list[list[int]]:
        """Compute the next tokens of each of `drafters`."""
        rows: list[Row] = []
        shape, started_s, at = StepShape(), self._clock(), 0
        for drafter, new in zip(drafters, chunks, strict=True):
            rows.append(_row(drafter, at, len(new), drafter.computed_tokens + len(new)))
            shape += prefill_shape(drafter.computed_tokens, len(new))
            at += len(new)
        batch = _a_batch(rows, chunks, ())
        if self._device is None:
            self._network.forward(batch)
        else:
            self._device.collect(self._device.submit(batch, ()))
        self._cost.observe(shape, self._clock() - started_s)
        return []


_UNSOUND = -1
"""Stands for a guess that was drawn from logits that are no numbers."""


def _row(drafter: ModelDrafter, start: int, tokens: int, context_tokens: int) -> Row:
    return Row(start, tokens, context_tokens, drafter.table.ids[: blocks_for(context_tokens)])


def _append(guesses: list[list[int]], samples: list[Sample | None]) -> None:
    for tokens, drawn in zip(guesses, samples, strict=False):
        tokens.append(_UNSOUND if drawn is None else drawn.token_id)


def _sound(tokens: list[int], vocabulary: int) -> list[int]:
    """`tokens` up to the first that is none."""
    end = next((at for at, token in enumerate(tokens) if not 0 <= token < vocabulary), len(tokens))
    return tokens[:end]


def _a_batch(
    rows: list[Row], token_ids: list[Tokens], wanted: Iterable[int], *, ahead: tuple[tuple[int, int], ...] = ()
) -> Batch:
    ids, positions, slots = placed(rows, token_ids)
    return Batch(ids, positions, slots, tuple(rows), torch.tensor(list(wanted), dtype=torch.int64), ahead=ahead)
