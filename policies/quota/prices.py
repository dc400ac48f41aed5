"""The price of a token: of each model, of each pool, and from a day on. Whole numbers, so that sums are exact."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from policies.quantities import PRICE_PARTS


class Prices(NamedTuple):
    """The price of a token in millionths of a unit of cost: of a prompt token that was computed, of one that was
    cached, and of one of the answer."""

    uncached: int = PRICE_PARTS
    cached: int = PRICE_PARTS // 10
    output: int = 4 * PRICE_PARTS


class SomePrices(NamedTuple):
    """The prices that an entry of the file gives; None: that of the entry above it."""

    uncached: int | None = None
    cached: int | None = None
    output: int | None = None

    def over(self, below: Prices) -> Prices:
        """These prices, and those of `below` where none is given."""
        given = zip(self, below, strict=True)
        return Prices(*(under if price is None else price for price, under in given))


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
            return self.of(model, "")
        found = [self.of(model, pool) for pool in (("", *self.pools) if pools is None else pools)]
        return Prices(*map(max, zip(*found, strict=True))) if found else self.of(model, "")
