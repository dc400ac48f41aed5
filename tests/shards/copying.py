"""A fake network that likes to repeat what it reads."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shards.exec.fake import FakeNetwork

_LIKES_IT = 8.0


class CopyingNetwork(FakeNetwork):
    """As `FakeNetwork`, but in `likes` of 8 places the likeliest token is what came behind the last one before."""

    def __init__(self, *, likes: int = 6, vocabulary: int = 256) -> None:
        super().__init__(vocabulary=vocabulary)
        self._likes = likes

    def _logits(self, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        logits = super()._logits(tokens)
        before = np.flatnonzero(tokens[:-1] == tokens[-1])
        if len(before) and int(tokens.sum()) % 8 < self._likes:
            logits[tokens[before[-1] + 1]] += _LIKES_IT
        return logits
