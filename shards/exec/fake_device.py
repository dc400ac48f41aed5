"""A fake network on a fake device, for tests of the code that runs ahead of a device."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shards.exec.batch import Batch
from shards.exec.drawing import Adjustment, Drawing, Sample, SlotState
from shards.exec.fake import FakeHostMemory, FakeNetwork
from shards.exec.sampling import Sampler, sample
from shards.kv.keys import BLOCK_TOKENS
from shards.nouns import SamplingParams

_MOST_DUE = 2


@dataclass
class _Queued:
    """A submitted batch; its `masks` come later if any of its drawings is masked."""

    batch: Batch
    drawings: Sequence[Drawing]
    masks: Sequence[bytes] | None


@dataclass
class _State:
    """What a slot holds."""

    seen: Tensor
    counts: Tensor
    began: SlotState


@dataclass
class _Allowed:
    """The guide of one draw."""

    mask: bytes
    eos_token_ids: frozenset[int] = field(default_factory=frozenset)

    def allowed(self) -> npt.NDArray[np.bool_]:
        """The tokens of the mask."""
        return np.unpackbits(np.frombuffer(self.mask, np.uint8), bitorder="little").view(np.bool_)


class FakeDevice(FakeNetwork):
    """A `FakeNetwork` that computes as late as possible: when a batch is collected, or when its blocks are copied.

    So it exposes code that reads a token too early or changes a submitted batch. It draws as `sample` does: an engine
    that draws on the host gives the same tokens. It refuses more than one batch ahead of another.
    """

    most_rows = 64

    def __init__(self, *, vocabulary: int = 256, context_tokens: int = 4096) -> None:
        super().__init__(vocabulary=vocabulary, context_tokens=context_tokens)
        self.most_due = 0
        self._queue: deque[_Queued] = deque()
        self._landed: dict[int, list[Sample | None]] = {}
        self._slots: dict[int, _State] = {}
        self._reserved = 0
        self._due: deque[int] = deque()
        self._submitted = self._computed = 0
        self._last: list[int] = []

    def reserve(self, rows: int) -> None:
        """Allow `rows` slots."""
        self._reserved = rows

    def prepare(self, rows: int, drawn: int = 0) -> None:
        """Do nothing: there is nothing to compile."""

    def submit(self, batch: Batch, drawings: Sequence[Drawing]) -> int:
        """Queue `batch`, to be computed later."""
        if len(self._due) == _MOST_DUE:
            raise RuntimeError(f"{_MOST_DUE} batches were not collected")
        if self._queue and self._queue[-1].masks is None:
            raise RuntimeError("the batch before this one has no masks yet")
        is_masked = any(drawing.is_masked for drawing in drawings)
        self._queue.append(_Queued(batch, tuple(drawings), None if is_masked else ()))
        self._submitted += 1
        self._due.append(self._submitted)
        self.most_due = max(self.most_due, len(self._due))
        return self._submitted

    def mask(self, ticket: Hashable, masks: Sequence[bytes]) -> None:
        """Let the last batch draw."""
        last = self._queue[-1]
        if ticket != self._submitted or last.masks is not None:
            raise RuntimeError(f"batch {ticket} does not wait for masks")
        last.masks = tuple(masks)

    def collect(self, ticket: Hashable) -> list[Sample | None]:
        """The batch's tokens. Raises RuntimeError if another batch is due first."""
        due = self._due.popleft()
        if due != ticket:
            raise RuntimeError(f"batch {ticket} is not the one that is due")
        self._compute_up_to(due)
        return self._landed.pop(due)

    def draw(self, logits: Tensor, drawings: Sequence[Drawing], masks: Sequence[bytes] = ()) -> list[Sample | None]:
        """Tokens drawn as on the host."""
        if not drawings:
            return []
        allowed = iter(masks)
        samplers = [self._sampler(drawing, next(allowed) if drawing.is_masked else None) for drawing in drawings]
        samples = sample(logits, samplers)
        for drawing, drawn in zip(drawings, samples, strict=True):
            if drawing.adjustment is not None and drawing.adjustment.counts and drawn is not None:
                state = self._slots[drawing.adjustment.slot]
                state.seen[drawn.token_id] = True
                state.counts[drawn.token_id] += 1
        return samples

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
            queued = self._queue.popleft()
            if queued.masks is None:
                raise RuntimeError("a batch is needed that still waits for its masks")
            self._computed += 1
            samples = self.draw(super().forward(self._resolved(queued.batch)), queued.drawings, queued.masks)
            self._landed[self._computed] = samples
            self._last = [0 if drawn is None else drawn.token_id for drawn in samples]

    def _resolved(self, batch: Batch) -> Batch:
        token_ids = batch.token_ids.clone()
        for token, place in batch.ahead:
            token_ids[token] = self._last[place]
        return replace(batch, token_ids=token_ids)

    def _sampler(self, drawing: Drawing, mask: bytes | None) -> Sampler:
        adjustment, position = drawing.adjustment, drawing.position
        params = SamplingParams(
            temperature=drawing.temperature,
            top_k=drawing.top_k,
            top_p=drawing.top_p,
            min_p=drawing.min_p,
            top_logprobs=drawing.top_logprobs,
        )
        stops: frozenset[int] = frozenset()
        if adjustment is not None:
            began = self._state(adjustment).began
            stops = frozenset(began.stops)
            params = replace(
                params,
                repetition_penalty=adjustment.repetition,
                presence_penalty=adjustment.presence,
                frequency_penalty=adjustment.frequency,
                logit_bias=dict(began.bias),
                min_new_tokens=0 if adjustment.may_end else position + 1,
            )
        sampler = Sampler(params, seed=drawing.seed, stop_token_ids=stops, vocabulary=self.vocabulary)
        sampler.drawn = position
        if adjustment is not None:
            state = self._slots[adjustment.slot]
            sampler.seen = state.seen if sampler.repeats else None
            sampler.counts = state.counts if sampler.counts_output else None
        if mask is not None:
            sampler.guide = _Allowed(mask[: -(-self.vocabulary // 8)])  # type: ignore[assignment]
        return sampler

    def _state(self, adjustment: Adjustment) -> _State:
        if not 0 <= adjustment.slot < self._reserved:
            raise ValueError(f"slot {adjustment.slot} is none of {self._reserved}")
        begins = adjustment.begins
        if begins is not None:
            prompt, answer = (np.frombuffer(part, "<u4").astype(np.int64) for part in (begins.prompt, begins.answer))
            counts = torch.from_numpy(np.bincount(answer, minlength=self.vocabulary)).float()
            seen = counts > 0
            seen[torch.from_numpy(prompt)] = True
            self._slots[adjustment.slot] = _State(seen, counts, begins)
        return self._slots[adjustment.slot]


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
