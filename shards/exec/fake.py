"""A network without weights, for tests of the code that drives a network."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shards.exec.batch import Batch, Row
from shards.exec.moves import KvMove
from shards.kv.fingerprint import Layout
from shards.kv.keys import BLOCK_TOKENS
from shards.kv.window_layout import KvWindow

_EMPTY = -1


class FakeNetwork:
    """Logits that depend on every token and position of a sequence, as read back from its KV.

    The KV of a token is the token itself, written at its slot. So a wrong block, slot or position, or a block that is
    shared too early or freed too late, changes the drawn tokens; reading an unwritten slot is an error. `answer`
    computes the same without any KV. `calls` counts the steps and `computed` the tokens of each.

    With a `window`, tokens are also written to pages, and those that a token sees there must be the same.
    """

    def __init__(self, *, vocabulary: int = 256, context_tokens: int = 4096, window: KvWindow | None = None) -> None:
        self.vocabulary, self.context_tokens, self.block_bytes = vocabulary, context_tokens, BLOCK_TOKENS * 8
        self.window = window
        self.computed: list[int] = []
        self._memory = np.full(0, _EMPTY, dtype=np.int64)
        self._pages = self._memory

    @property
    def calls(self) -> int:
        """The number of computed steps."""
        return len(self.computed)

    def allocate(self, blocks: int) -> None:
        """Allocate unwritten memory for `blocks` blocks."""
        self._memory = np.full(blocks * BLOCK_TOKENS, _EMPTY, dtype=np.int64)

    def allocate_divided(self, blocks: int, pages: int) -> None:
        """Allocate unwritten memory for `blocks` blocks and `pages` pages."""
        self.allocate(blocks)
        self._pages = np.full(pages * BLOCK_TOKENS, _EMPTY, dtype=np.int64)

    def host_memory(self, slots: int) -> FakeHostMemory:
        """Host memory for `slots` blocks."""
        return FakeHostMemory(self._memory.reshape(-1, BLOCK_TOKENS), slots)

    def forward(self, batch: Batch) -> Tensor:
        """Logits [len(batch.logit_rows), vocabulary] float32."""
        self.computed.append(len(batch.token_ids))
        self._memory[batch.slots.numpy()] = batch.token_ids.numpy()
        if batch.window_pages is not None:
            pages = batch.window_pages.numpy()[batch.slots.numpy() // BLOCK_TOKENS]
            self._pages[pages * BLOCK_TOKENS + batch.slots.numpy() % BLOCK_TOKENS] = batch.token_ids.numpy()
        at = {int(index): place for place, index in enumerate(batch.logit_rows)}
        logits = np.zeros((len(at), self.vocabulary), dtype=np.float32)
        for row in batch.rows:
            tokens = self._read(row)
            if batch.window_pages is not None:
                self._compare(row, tokens, batch.window_pages.numpy())
            for index in range(row.start, row.start + row.tokens):
                position = int(batch.positions[index])
                if position != row.context_tokens - row.tokens + index - row.start:
                    raise ValueError(f"token {index} has position {position}")
                if index in at:
                    logits[at[index]] = self._logits(tokens[: position + 1])
        return torch.from_numpy(logits)

    def blend(self, move: KvMove) -> None:
        """Copy the tokens."""
        self._memory[_slots(move.target, move.into, move.tokens)] = self._moved(move)

    def deviations(self, move: KvMove) -> list[float]:
        """1 for each other token, 0 for the same: so all are 0."""
        target = self._memory[_slots(move.target, move.into, move.tokens)]
        return [float(value) for value in target != self._moved(move)]

    def _moved(self, move: KvMove) -> npt.NDArray[np.int64]:
        tokens: npt.NDArray[np.int64] = self._memory[_slots(move.source, move.start, move.tokens)]
        if (tokens == _EMPTY).any():
            raise ValueError("KV is moved that was never written")
        return tokens

    def answer(self, prompt: list[int], max_new_tokens: int) -> list[int]:
        """The greedy answer, computed from the tokens alone."""
        tokens = list(prompt)
        for _ in range(max_new_tokens):
            tokens.append(int(self._logits(np.array(tokens)).argmax()))
        return tokens[len(prompt) :]

    def _read(self, row: Row) -> npt.NDArray[np.int64]:
        slots = np.array(row.blocks)[:, None] * BLOCK_TOKENS + np.arange(BLOCK_TOKENS)
        tokens: npt.NDArray[np.int64] = self._memory[slots.ravel()[: row.context_tokens]]
        if len(tokens) < row.context_tokens or (tokens == _EMPTY).any():
            raise ValueError("KV is read that was never written")
        return tokens

    def _compare(self, row: Row, tokens: npt.NDArray[np.int64], pages: npt.NDArray[np.int32]) -> None:
        """Raise ValueError unless the pages that `row` sees have its `tokens`."""
        assert self.window is not None, "there are no pages without a window"
        seen = np.arange(max(0, row.context_tokens - row.tokens - self.window.tokens + 1), row.context_tokens)
        slots = pages[np.array(row.blocks)[seen // BLOCK_TOKENS]].astype(np.int64) * BLOCK_TOKENS + seen % BLOCK_TOKENS
        if (self._pages[slots] != tokens[seen]).any():
            raise ValueError("a page that is seen has other tokens")

    def _logits(self, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        state = int(((tokens + 1) * (np.arange(len(tokens)) * 7919 + 104729) % 1_000_003).sum())
        spread = (state * 31 + np.arange(self.vocabulary) * (state % 997 + 1)) % 1009
        logits: npt.NDArray[np.float32] = (spread / 168).astype(np.float32)
        return logits


def _slots(blocks: tuple[int, ...], start: int, tokens: int) -> npt.NDArray[np.int64]:
    positions = np.arange(start, start + tokens)
    slots: npt.NDArray[np.int64] = np.array(blocks)[positions // BLOCK_TOKENS] * BLOCK_TOKENS + positions % BLOCK_TOKENS
    return slots


class FakeHostMemory:
    """Host memory beside `blocks` [blocks, 64]."""

    def __init__(self, blocks: npt.NDArray[np.int64], slots: int) -> None:
        self.slots = slots
        self._blocks = blocks
        self._slots = np.full((slots, BLOCK_TOKENS), _EMPTY, dtype=np.int64)

    @property
    def layout(self) -> Layout:
        """One array of the tokens."""
        return (("int64", (BLOCK_TOKENS,)),)

    def raw(self, slot: int) -> tuple[memoryview, ...]:
        """The bytes of `slot` itself."""
        return (memoryview(self._slots[slot]).cast("B"),)

    def save(self, block: int, slot: int) -> None:
        """Copy device block `block` into `slot`."""
        self._slots[slot] = self._blocks[block]

    def load(self, slot: int, block: int) -> None:
        """Copy `slot` into device block `block`."""
        self._blocks[block] = self._slots[slot]
