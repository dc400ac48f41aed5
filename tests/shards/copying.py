"""A fake network that likes to repeat what it reads."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shards.exec.fake import FakeNetwork
from shards.exec.fake_device import FakeDevice

_LIKES_IT = 8.0


class CopyingNetwork(FakeNetwork):
    """As `FakeNetwork`, but in `likes` of 8 places the likeliest token is what came behind the last one before."""

    def __init__(self, *, likes: int = 6, vocabulary: int = 256) -> None:
        super().__init__(vocabulary=vocabulary)
        self._likes = likes

    def _logits(self, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        return _with_a_copy(super()._logits(tokens), tokens, self._likes)


class CopyingDevice(FakeDevice):
    """The same on a device."""

    def __init__(self, *, likes: int = 6, vocabulary: int = 256) -> None:
        super().__init__(vocabulary=vocabulary)
        self._likes = likes

    def _logits(self, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        return _with_a_copy(super()._logits(tokens), tokens, self._likes)


def _with_a_copy(logits: npt.NDArray[np.float32], tokens: npt.NDArray[np.int64], likes: int) -> npt.NDArray[np.float32]:
    before = np.flatnonzero(tokens[:-1] == tokens[-1])
    if len(before) and int(tokens.sum()) % 8 < likes:
        logits[tokens[before[-1] + 1]] += _LIKES_IT
    return logits
