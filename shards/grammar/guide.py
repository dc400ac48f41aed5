"""One answer's progress through a grammar: the tokens that may come next, and whether it may end."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from llguidance import LLMatcher


class Guide:
    """The state of one answer. Call `allowed`, draw, `note`, and repeat; a token that was not allowed breaks it.

    `fault` is the reason why the answer cannot continue: the grammar is too complex for the drawn tokens. No token is
    allowed then.
    """

    def __init__(self, matcher: LLMatcher, *, vocabulary: int, eos_token_ids: frozenset[int]) -> None:
        self.eos_token_ids = eos_token_ids
        self.fault = ""
        self._matcher, self._vocabulary = matcher, vocabulary
        self._bits = np.zeros(-(-vocabulary // 32), dtype=np.int32)

    def __repr__(self) -> str:
        return f"Guide({self.fault or ('over' if self.is_over else 'open')})"

    @property
    def is_over(self) -> bool:
        """Whether the answer is complete, so that no token can follow."""
        return not self.fault and self._matcher.is_stopped() and not self._matcher.is_error()

    def allowed(self) -> npt.NDArray[np.bool_]:
        """The tokens that may come next [vocabulary]; tokens that end the answer only where it is complete."""
        bits = self._bits
        self._matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        # a failed matcher would let the answer end where it is
        if self._matcher.is_error():
            self.fault = self._matcher.get_error().partition("\n")[0]
            bits[:] = 0
        return np.unpackbits(bits.view(np.uint8), count=self._vocabulary, bitorder="little").view(np.bool_)

    def note(self, token_id: int) -> None:
        """Advance by `token_id`."""
        self._matcher.consume_token(token_id)
