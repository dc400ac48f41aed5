"""Transfers to the device and of tokens back, in turns, so that neither side waits for the other."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from shards.gpu.device import Mark, host_words, mark

TURNS = 3
"""Buffers on each side: one that the device works on, one that is being filled, one that is being read."""


def tokens_of(drawn: Tensor) -> list[int | None]:
    """The tokens of `drawn` [token|is sound, rows], on the host; None where the logits were not finite."""
    tokens, sound = drawn.tolist()
    return [token if is_sound else None for token, is_sound in zip(tokens, sound, strict=True)]


class Outbound:
    """Host buffers that are filled and copied to the device in turn. A buffer is refilled only after its copy."""

    def __init__(self, device: torch.device, *, on_copied: Callable[[torch.device], Mark] = mark) -> None:
        self._device, self._on_copied = device, on_copied
        self._buffers = [host_words(0, device) for _ in range(TURNS)]
        self._copied: list[Mark | None] = [None] * TURNS
        self._turn = 0

    def __repr__(self) -> str:
        return f"Outbound({[len(buffer) for buffer in self._buffers]} words)"

    def next(self, words: int) -> Tensor:
        """Host memory [words] int32 to fill and pass to `send`; waits if its last contents are still being copied."""
        copied = self._copied[self._turn]
        if copied is not None:
            copied.synchronize()
        if len(self._buffers[self._turn]) < words:
            # twice the need: contexts grow, and pinning memory stops the device
            self._buffers[self._turn] = host_words(2 * words, self._device)
        return self._buffers[self._turn][:words]

    def send(self, filled: Tensor, target: Tensor | None = None) -> Tensor:
        """Start a copy of the buffer from `next` to the device, into `target` [words] if given; returns the copy."""
        if target is None:
            target = torch.empty_like(filled, device=self._device, pin_memory=False)
        target.copy_(filled, non_blocking=True)
        self._copied[self._turn] = self._on_copied(self._device)
        self._turn = (self._turn + 1) % TURNS
        return target


@dataclass(frozen=True, slots=True)
class Ticket:
    """A submitted step that draws `rows` tokens."""

    number: int
    rows: int


class Inbound:
    """Drawn tokens that are being copied to the host, collected in the order of their steps."""

    def __init__(self, device: torch.device, rows: int, *, on_copied: Callable[[torch.device], Mark] = mark) -> None:
        self._device, self._on_copied, self._rows = device, on_copied, rows
        self._buffers = [host_words(2 * rows, device) for _ in range(TURNS)]
        self._due: deque[tuple[Ticket, Mark]] = deque()
        self._number = 0

    def __repr__(self) -> str:
        return f"Inbound({len(self._due)} due, {self._number} so far)"

    def put(self, drawn: Tensor) -> Ticket:
        """Start copying `drawn` [token|is sound, rows] int32 to the host. Raises RuntimeError with too many due."""
        rows = drawn.shape[1]
        if len(self._due) == TURNS or rows > self._rows:
            raise RuntimeError(f"{len(self._due)} of {TURNS} steps were not collected, and {rows} of {self._rows} rows")
        buffer = self._buffers[self._number % TURNS][: 2 * rows]
        buffer.view(2, rows).copy_(drawn, non_blocking=True)
        ticket = Ticket(self._number, rows)
        self._due.append((ticket, self._on_copied(self._device)))
        self._number += 1
        return ticket

    def take(self, ticket: Ticket) -> list[int | None]:
        """Wait for the tokens; None where the logits were not finite. Raises ValueError out of turn."""
        if not self._due or self._due[0][0] != ticket:
            raise ValueError(f"step {ticket.number} is not the one that is due")
        _, copied = self._due.popleft()
        copied.synchronize()
        return tokens_of(self._buffers[ticket.number % TURNS][: 2 * ticket.rows].view(2, ticket.rows))

    def check(self) -> None:
        """Assert that no buffer holds two steps."""
        numbers = [ticket.number for ticket, _ in self._due]
        assert numbers == list(range(self._number - len(numbers), self._number)), "steps are due out of order"
        assert len(numbers) <= TURNS, "a buffer holds two steps"
