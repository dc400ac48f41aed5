"""What a request costs: of each model, of each pool, and from a day on. Whole numbers, so that sums are exact."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import NamedTuple

from policies.quantities import PRICE_PARTS


class Prices(NamedTuple):
    """Prices in millionths of a unit of cost: of a prompt token that was computed, of one that was cached, of one of
    the answer, of a computed one that was written to a cache (None: as any computed one), of an image, and of a second
    at the backend."""

    uncached: int = PRICE_PARTS
    cached: int = PRICE_PARTS // 10
    output: int = 4 * PRICE_PARTS
    cache_write: int | None = None
    image: int = 0
    second: int = 0

    @property
    def written(self) -> int:
        """That of a token that is written to a cache."""
        return self.uncached if self.cache_write is None else self.cache_write

    def or_higher(self, other: Prices) -> Prices:
        """The higher one of each price."""
        has_own = self.cache_write is not None or other.cache_write is not None
        return Prices(
            max(self.uncached, other.uncached),
            max(self.cached, other.cached),
            max(self.output, other.output),
            max(self.written, other.written) if has_own else None,
            max(self.image, other.image),
            max(self.second, other.second),
        )


class SomePrices(NamedTuple):
    """The prices that an entry of the file gives; None: that of the entry above it."""

    uncached: int | None = None
    cached: int | None = None
    output: int | None = None
    cache_write: int | None = None
    image: int | None = None
    second: int | None = None

    def over(self, below: Prices) -> Prices:
        """These prices, and those of `below` where none is given."""
        return Prices(
            below.uncached if self.uncached is None else self.uncached,
            below.cached if self.cached is None else self.cached,
            below.output if self.output is None else self.output,
            below.cache_write if self.cache_write is None else self.cache_write,
            below.image if self.image is None else self.image,
            below.second if self.second is None else self.second,
        )


@dataclass(frozen=True, slots=True)
class PriceList:
    """All prices that hold at one time. A price of a pool comes before that of a model, and that before the `usual`.

    `currency` is a code of ISO 4217: a unit of cost is a millionth of it. None: units have no currency. `later` are
    the lists that hold from a time on, in Unix seconds, the earliest first.
    """

    usual: Prices = field(default_factory=Prices)
    models: Mapping[str, SomePrices] = field(default_factory=dict)
    pools: Mapping[str, SomePrices] = field(default_factory=dict)
    currency: str | None = None
    later: tuple[tuple[float, PriceList], ...] = ()
    are_usual: bool = field(init=False, compare=False, repr=False, default=False)
    """Whether the `usual` ones hold for every model and pool."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "are_usual", not self.models and not self.pools)

    def at(self, now: float) -> PriceList:
        """The list that holds at `now`, in Unix seconds."""
        for starts, prices in reversed(self.later):
            if now >= starts:
                return prices
        return self

    def of(self, model: str, pool: str) -> Prices:
        """The prices of `model` at `pool`."""
        found = self.usual
        for entry in (self.models.get(model), self.pools.get(pool)):
            if entry is not None:
                found = entry.over(found)
        return found

    def highest(self, model: str, pools: Collection[str] | None) -> Prices:
        """The highest prices of `model` at any of `pools`, None: at any pool, for as long as the pool is not known."""
        if not self.pools:
            return self.of(model, "") if model in self.models else self.usual
        found = [self.of(model, pool) for pool in (("", *self.pools) if pools is None else pools)]
        return reduce(Prices.or_higher, found) if found else self.of(model, "")
