"""How far a document's KV in a prompt was from that of its chunk, token by token. Torch-free."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from shards.kv.adapter_domain import tenant_domain

MOST_TOKENS = 4 * 2**20
"""The number of tokens with a remembered deviation: 16 MiB."""


class Deviations:
    """The deviations of chunks by domain and key, as far as `most_tokens` allow; the longest unused are forgotten.

    A token deviates if its KV depends on what stands before its document, such as a name that another document
    explains: these tokens must be computed again wherever the chunk is used.
    """

    def __init__(self, most_tokens: int = MOST_TOKENS) -> None:
        self._most_tokens, self._tokens = most_tokens, 0
        self._known: OrderedDict[tuple[str, int], npt.NDArray[np.float32]] = OrderedDict()

    def __repr__(self) -> str:
        return f"Deviations({len(self._known)} chunks, {self._tokens} tokens)"

    def of(self, domain: str, key: int, tokens: int) -> npt.NDArray[np.float32] | None:
        """Those of the `tokens` tokens of the chunk `key`; None if they were not measured or are forgotten."""
        found = self._known.get((domain, key))
        if found is None or len(found) != tokens:
            return None
        self._known.move_to_end((domain, key))
        return found

    def learn(self, domain: str, key: int, deviations: Sequence[float]) -> None:
        """Remember those of the chunk `key`; of a chunk that was measured before, the larger of both counts."""
        measured = np.asarray(deviations, dtype=np.float32)
        known = self._known.pop((domain, key), None)
        if known is not None:
            self._tokens -= len(known)
            measured = np.maximum(measured, known) if len(known) == len(measured) else measured
        self._known[domain, key] = measured
        self._tokens += len(measured)
        while self._tokens > self._most_tokens:
            self._tokens -= len(self._known.popitem(last=False)[1])

    def forget(self, domain: str | None = None) -> None:
        """Forget those of `domain`, all adapters included, or all."""
        for known in [known for known in self._known if domain in (None, tenant_domain(known[0]))]:
            self._tokens -= len(self._known.pop(known))

    def check(self) -> None:
        """Assert that the tokens are counted."""
        assert self._tokens == sum(map(len, self._known.values())) <= self._most_tokens, "deviations are miscounted"
