"""The Protocol of whoever computes prefixes on backends."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from policies.nouns import Tenant
from router.ask import Ask


class Measure(NamedTuple):
    """How a prompt looks to the backends of `model`: the keys of its whole blocks, and its tokens (some are a guess
    where nobody has the tokenizer)."""

    model: str
    keys: tuple[int, ...]
    tokens: int


class Warmed(NamedTuple):
    """A prompt was computed on `backend`, of `pool`."""

    backend: str
    pool: str


class Warmer(Protocol):
    """Computes prompts on backends, on behalf of tenants."""

    async def measure(self, ask: Ask, tenant: Tenant) -> Measure:
        """How the prompt of `ask` looks. Raises ExpectedError."""
        ...

    async def warm(self, ask: Ask, tenant: str, *, avoiding: frozenset[str], placed: Callable[[str], None]) -> Warmed:
        """Compute the prompt of `ask` on the best backend that is not in `avoiding`. Raises ExpectedError.

        `placed` hears where it goes, and once more if that fails and another one tries.
        """
        ...
