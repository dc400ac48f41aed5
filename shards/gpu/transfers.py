"""Transfers to the device and of tokens back, in turns, so that neither side waits for the other."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shards.exec.drawing import Drawing, Sample
from shards.gpu.device import Mark, host_words, mark
from shards.kernels.logprobs import LOGPROB_WORDS, MOST_TOP, TOP_ROOM
from shards.kernels.sampling import DrawnRows
from shards.nouns import TokenLogprobs

TURNS = 3
"""Buffers on each side: one that the device works on, one that is being filled, one that is being read."""


def samples_of(drawn: DrawnRows, drawings: Sequence[Drawing]) -> list[Sample | None]:
    """The tokens of `drawn`, on the host, with the logprobs that were asked for; None for rows that are not sound."""
    tokens, sound = drawn.tokens.tolist()
    samples = [Sample(token) if is_sound else None for token, is_sound in zip(tokens, sound, strict=True)]
    for row, drawing in enumerate(drawings):
        sample = samples[row]
        if drawing.top_logprobs is not None and sample is not None:
            samples[row] = Sample(sample.token_id, _logprobs_of(drawn.logprobs[row].numpy(), drawing.top_logprobs))
    return samples


def _logprobs_of(words: npt.NDArray[np.int32], top: int) -> TokenLogprobs:
    values, ids = words[: 1 + MOST_TOP].view(np.float32).tolist(), words[1 + TOP_ROOM :].tolist()
    # a vocabulary may have fewer tokens
    likeliest = zip(ids[:top], values[1 : 1 + top], strict=True)
    return TokenLogprobs(values[0], tuple(pair for pair in likeliest if pair[0] >= 0))


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
    """A submitted step, which draws by `drawings`."""

    number: int
    drawings: Sequence[Drawing] = field(compare=False)

    @property
    def wants_logprobs(self) -> bool:
        """Whether any of its rows wants log-probabilities."""
        return any(drawing.top_logprobs is not None for drawing in self.drawings)


class Inbound:
    """DrawnRows tokens that are being copied to the host, collected in the order of their steps."""

    def __init__(self, device: torch.device, rows: int, *, on_copied: Callable[[torch.device], Mark] = mark) -> None:
        self._device, self._on_copied, self._rows = device, on_copied, rows
        self._buffers = [host_words((2 + LOGPROB_WORDS) * rows, device) for _ in range(TURNS)]
        self._due: deque[tuple[Ticket, Mark]] = deque()
        self._number = 0

    def __repr__(self) -> str:
        return f"Inbound({len(self._due)} due, {self._number} so far)"

    def next(self, drawings: Sequence[Drawing]) -> Ticket:
        """The ticket of the step with which `put` is called next. Raises RuntimeError with too many due."""
        rows = len(drawings)
        if len(self._due) == TURNS or rows > self._rows:
            raise RuntimeError(f"{len(self._due)} of {TURNS} steps were not collected, and {rows} of {self._rows} rows")
        return Ticket(self._number, drawings)

    def put(self, ticket: Ticket, drawn: DrawnRows) -> None:
        """Start copying `drawn`, of the last ticket, to the host; logprobs only if they are wanted."""
        assert ticket.number == self._number, "steps are put in the order of their tickets"
        here = self._of(ticket)
        here.tokens.copy_(drawn.tokens, non_blocking=True)
        if ticket.wants_logprobs:
            here.logprobs.copy_(drawn.logprobs, non_blocking=True)
        self._due.append((ticket, self._on_copied(self._device)))
        self._number += 1

    def take(self, ticket: Ticket) -> list[Sample | None]:
        """Wait for the tokens; None for rows that are not sound. Raises ValueError out of turn."""
        if not self._due or self._due[0][0] != ticket:
            raise ValueError(f"step {ticket.number} is not the one that is due")
        _, copied = self._due.popleft()
        copied.synchronize()
        return samples_of(self._of(ticket), ticket.drawings)

    def _of(self, ticket: Ticket) -> DrawnRows:
        rows, buffer = len(ticket.drawings), self._buffers[ticket.number % TURNS]
        end = (2 + LOGPROB_WORDS) * rows
        return DrawnRows(buffer[: 2 * rows].view(2, rows), buffer[2 * rows : end].view(rows, LOGPROB_WORDS))

    def check(self) -> None:
        """Assert that no buffer holds two steps."""
        numbers = [ticket.number for ticket, _ in self._due]
        assert numbers == list(range(self._number - len(numbers), self._number)), "steps are due out of order"
        assert len(numbers) <= TURNS, "a buffer holds two steps"
