"""A fake network on a fake device, for tests of the code that runs ahead of a device."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
from torch import Tensor

from shards.exec.batch import Batch
from shards.exec.drawing import Drawing
from shards.exec.fake import FakeHostMemory, FakeNetwork
from shards.exec.sampling import Sampler, sample
from shards.kv.keys import BLOCK_TOKENS
from shards.nouns import SamplingParams

_MOST_DUE = 2


class FakeDevice(FakeNetwork):
    """A `FakeNetwork` that computes as late as possible: when a batch is collected, or when its blocks are copied.

    So it exposes code that reads a token too early or changes a submitted batch. It draws as `sample` does: an engine
    that draws on the host gives the same tokens. It refuses more than one batch ahead of another.
    """

    most_rows = 64

    def __init__(self, *, vocabulary: int = 256, context_tokens: int = 4096) -> None:
        super().__init__(vocabulary=vocabulary, context_tokens=context_tokens)
        self.most_due = 0
        self._queue: deque[tuple[Batch, tuple[Drawing, ...]]] = deque()
        self._landed: dict[int, list[int | None]] = {}
        self._due: deque[int] = deque()
        self._submitted = self._computed = 0
        self._last: list[int] = []

    def prepare(self, rows: int) -> None:
        """Do nothing: there is nothing to compile."""

    def submit(self, batch: Batch, drawings: Sequence[Drawing]) -> int:
        """Queue `batch`, to be computed later."""
        if len(self._due) == _MOST_DUE:
            raise RuntimeError(f"{_MOST_DUE} batches were not collected")
        self._queue.append((batch, tuple(drawings)))
        self._submitted += 1
        self._due.append(self._submitted)
        self.most_due = max(self.most_due, len(self._due))
        return self._submitted

    def collect(self, ticket: Hashable) -> list[int | None]:
        """The batch's tokens. Raises RuntimeError if another batch is due first."""
        due = self._due.popleft()
        if due != ticket:
            raise RuntimeError(f"batch {ticket} is not the one that is due")
        self._compute_up_to(due)
        return self._landed.pop(due)

    def draw(self, logits: Tensor, drawings: Sequence[Drawing]) -> list[int | None]:
        """Tokens drawn as on the host."""
        samples = sample(logits, [self._sampler(drawing) for drawing in drawings]) if drawings else []
        return [None if drawn is None else drawn.token_id for drawn in samples]

    def forward(self, batch: Batch) -> Tensor:
        """Logits of `batch`, computed after all submitted batches."""
        self.finish()
        return super().forward(self._resolved(batch))

    def host_memory(self, slots: int) -> FakeHostMemory:
        """Host memory for `slots` blocks; copies run after all submitted batches."""
        return _OrderedMemory(self, self._memory.reshape(-1, BLOCK_TOKENS), slots)

    def finish(self) -> None:
        """Compute all submitted batches."""
        self._compute_up_to(self._submitted)

    def _compute_up_to(self, ticket: int) -> None:
        while self._computed < ticket:
            batch, drawings = self._queue.popleft()
            self._computed += 1
            tokens = self.draw(super().forward(self._resolved(batch)), drawings)
            self._landed[self._computed] = tokens
            self._last = [token or 0 for token in tokens]

    def _resolved(self, batch: Batch) -> Batch:
        token_ids = batch.token_ids.clone()
        for token, place in batch.ahead:
            token_ids[token] = self._last[place]
        return replace(batch, token_ids=token_ids)

    def _sampler(self, drawing: Drawing) -> Sampler:
        top_p, min_p = drawing.top_p, drawing.min_p
        params = SamplingParams(temperature=drawing.temperature, top_k=drawing.top_k, top_p=top_p, min_p=min_p)
        sampler = Sampler(params, seed=drawing.seed, stop_token_ids=frozenset(), vocabulary=self.vocabulary)
        sampler.drawn = drawing.position
        return sampler


class _OrderedMemory(FakeHostMemory):
    def __init__(self, device: FakeDevice, blocks: npt.NDArray[np.int64], slots: int) -> None:
        super().__init__(blocks, slots)
        self._device = device

    def save(self, block: int, slot: int) -> None:
        """Copy device block `block` into `slot`."""
        self._device.finish()
        super().save(block, slot)

    def load(self, slot: int, block: int) -> None:
        """Copy `slot` into device block `block`."""
        self._device.finish()
        super().load(slot, block)
