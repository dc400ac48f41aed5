"""One answer's way through a grammar: which tokens may come next, and whether it may end."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from llguidance import LLMatcher


class Guide:
    """Where one answer stands. `allowed`, draw, `note`, and so on; a token that was not allowed breaks it.

    `fault` says why it cannot go on: the grammar is too complex for what was drawn. Nothing is allowed then.
    """

    def __init__(self, matcher: LLMatcher, *, vocabulary: int, eos_token_ids: frozenset[int]) -> None:
        self.eos_token_ids = eos_token_ids
        self.fault = ""
        self._matcher, self._vocabulary = matcher, vocabulary
        self._bits = np.zeros(-(-vocabulary // 32), dtype=np.int32)

    def __repr__(self) -> str:
        return f"Guide({self.fault or ('over' if self.is_over else 'on its way')})"

    @property
    def is_over(self) -> bool:
        """Is the answer whole, and can nothing be added to it?"""
        return not self.fault and self._matcher.is_stopped() and not self._matcher.is_error()

    def allowed(self) -> npt.NDArray[np.bool_]:
        """Which tokens may come next [vocabulary]; one that ends an answer where the answer is whole."""
        bits = self._bits
        self._matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        # a matcher that has failed would let the answer end where it is
        if self._matcher.is_error():
            self.fault = self._matcher.get_error().partition("\n")[0]
            bits[:] = 0
        return np.unpackbits(bits.view(np.uint8), count=self._vocabulary, bitorder="little").view(np.bool_)

    def note(self, token_id: int) -> None:
        """Go on by `token_id`."""
        self._matcher.consume_token(token_id)
