"""A large and a small fake network that take time, and a driver of an engine with both."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from torch import Tensor

from shards.draft_model import DraftModel
from shards.exec.batch import Batch
from shards.exec.fake import FakeNetwork
from shards.exec.fake_device import FakeDevice
from shards.exec.model_drafter import ModelDrafter
from shards.exec.network import Network
from shards.kv.keys import BLOCK_TOKENS
from shards.model import Model
from tests.shards.driver import EOS, Clock, Driver, a_tokenizer

LARGE_S, SMALL_S = 0.02, 0.001
"""What a step of either takes, whatever its size."""


class TimedNetwork(FakeNetwork):
    """As `FakeNetwork`; each step takes `step_s`, and in `eighths` of 8 places it draws the same tokens."""

    def __init__(self, clock: Clock, step_s: float, *, eighths: int = 8, **sizes: int) -> None:
        super().__init__(**sizes)  # type: ignore[arg-type]
        self._clock, self._step_s, self._eighths = clock, step_s, eighths

    def forward(self, batch: Batch) -> Tensor:
        self._clock.now_s += self._step_s
        return super().forward(batch)

    def _logits(self, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        return _with_errors(super()._logits(tokens), tokens, self._eighths)


class TimedDevice(FakeDevice):
    """The same on a device."""

    def __init__(self, clock: Clock, step_s: float, *, eighths: int = 8, **sizes: int) -> None:
        super().__init__(**sizes)
        self._clock, self._step_s, self._eighths = clock, step_s, eighths

    def _compute_up_to(self, ticket: int) -> None:
        self._clock.now_s += self._step_s * max(0, ticket - self._computed)
        super()._compute_up_to(ticket)

    def _logits(self, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        return _with_errors(super()._logits(tokens), tokens, self._eighths)


def _with_errors(
    logits: npt.NDArray[np.float32], tokens: npt.NDArray[np.int64], eighths: int
) -> npt.NDArray[np.float32]:
    return logits if int(tokens.sum()) % 8 < eighths else np.roll(logits, 1)


KINDS = [TimedNetwork, TimedDevice]


class DraftingDriver(Driver):
    """A driver of an engine with a draft model that draws the same tokens in `eighths` of 8 places; None: without one.

    `small` takes its place, and `large` that of the model. `draft_blocks`: of the draft model's KV.
    """

    def __init__(
        self,
        eighths: int | None = 8,
        *,
        kind: type[TimedNetwork | TimedDevice] = TimedNetwork,
        draft_blocks: int = 64,
        small: TimedNetwork | None = None,
        large: Network | None = None,
        clock: Clock | None = None,
        **options: object,
    ) -> None:
        clock = clock or Clock()
        draft_model = None
        if eighths is not None:
            self.small = small or kind(clock, SMALL_S, eighths=eighths)
            model = Model("small", self.small, a_tokenizer(), frozenset({EOS}))
            draft_model = DraftModel(model, draft_blocks * self.small.block_bytes, clock=clock)
            draft_model.prepare(4)
            self.small.computed.clear()
        super().__init__(large or kind(clock, LARGE_S), clock=clock, draft_model=draft_model, **options)

    @property
    def guessed(self) -> tuple[int, int]:
        """Tokens that the draft model guessed and the large one verified, and those of them that were drawn."""
        assert self.load is not None
        return self.load.model_drafted_tokens, self.load.model_accepted_tokens

    @property
    def drafters(self) -> list[ModelDrafter]:
        """Those of all answers that have not ended."""
        return self.engine._model_drafters()

    def step(self, *, check: bool = True) -> None:
        """As `Driver.step`; the draft model's KV must be that of the answers."""
        super().step(check=check)
        for sequence in (*self.engine._roster.running.values(), *self.engine._roster.waiting.values()):
            drafter = sequence.model_drafter
            if drafter is not None and drafter.computed_tokens:
                tokens, ids = drafter.computed_tokens, np.array(drafter.table.ids)
                slots = (ids[:, None] * BLOCK_TOKENS + np.arange(BLOCK_TOKENS)).ravel()[:tokens]
                expected = np.array(sequence.token_ids(0, min(tokens, sequence.seen_tokens)))
                assert self.small._memory[slots].tolist()[: len(expected)] == expected.tolist()

    def assert_nothing_is_held(self) -> None:
        super().assert_nothing_is_held()
        if self.engine.draft_model is not None:
            assert self.engine.draft_model.pool.owned == 0
