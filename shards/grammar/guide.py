"""One answer's progress through a grammar: the tokens that may come next, and whether it may end."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from llguidance import LLMatcher

CREDIT_S = 1.0
"""CPU time of an answer's masks beside `TOKEN_S`. A usual mask takes 0.1 ms, and all answers of a step wait for it."""

TOKEN_S = 0.02
"""What each token adds to the credit."""


class Guide:
    """The state of one answer. Call `allowed`, draw, `note`, and repeat; a token that was not allowed breaks it.

    `fault` is the reason why the answer cannot continue: the grammar is too complex for the drawn tokens. No token is
    allowed then. `clock` is the CPU time of this thread in s.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        *,
        vocabulary: int,
        eos_token_ids: frozenset[int],
        clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self.eos_token_ids = eos_token_ids
        self.fault = ""
        self._matcher, self._vocabulary = matcher, vocabulary
        self._bits = np.zeros(-(-vocabulary // 32), dtype=np.int32)
        self._clock, self._credit_s = clock, CREDIT_S

    def __repr__(self) -> str:
        return f"Guide({self.fault or ('over' if self.is_over else 'open')})"

    @property
    def is_over(self) -> bool:
        """Whether the answer is complete, so that no token can follow."""
        return not self.fault and self._matcher.is_stopped() and not self._matcher.is_error()

    def allowed(self) -> npt.NDArray[np.bool_]:
        """The tokens that may come next [vocabulary]; tokens that end the answer only where it is complete."""
        bits = self._bits
        if not self.fault:
            began_s = self._clock()
            self._matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
            self._pay(self._clock() - began_s)
        # a failed matcher would let the answer end where it is
        if self._matcher.is_error():
            self.fault = self._matcher.get_error().partition("\n")[0]
        if self.fault:
            bits[:] = 0
        return np.unpackbits(bits.view(np.uint8), count=self._vocabulary, bitorder="little").view(np.bool_)

    def note(self, token_id: int) -> None:
        """Advance by `token_id`."""
        began_s = self._clock()
        self._matcher.consume_token(token_id)
        self._pay(self._clock() - began_s - TOKEN_S)

    def _pay(self, seconds: float) -> None:
        self._credit_s = min(CREDIT_S, self._credit_s - seconds)
        if self._credit_s < 0:
            self.fault = f"its masks took {CREDIT_S:g} s and {TOKEN_S * 1000:g} ms for each token"
