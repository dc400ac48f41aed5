"""The Protocol for computing prefixes on backends."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from policies.nouns import Tenant
from router.ask import Ask


class Measure(NamedTuple):
    """A prompt as backends of `model` see it: the keys of its whole blocks, and its tokens (estimated without a
    tokenizer)."""

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
        """The model, block keys and tokens of the prompt of `ask`. Raises ExpectedError."""
        ...

    async def warm(self, ask: Ask, tenant: str, *, avoiding: frozenset[str], placed: Callable[[str], None]) -> Warmed:
        """Compute the prompt of `ask` on the best backend that is not in `avoiding`. Raises ExpectedError.

        `placed` gets the backend, and is called again if that fails and another one is tried.
        """
        ...
