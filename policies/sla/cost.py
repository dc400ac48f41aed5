"""The section `cost`: the cost of a token, in the units of the tenants' budgets or in a currency."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from policies.quantities import (
    CURRENCY_UNITS,
    MOST_PER_ONE,
    PRICE_PARTS,
    read_amount,
    read_currency,
    read_date,
    read_price,
)
from policies.quota.prices import PriceList, Prices, SomePrices
from policies.shapes import Key, Named, Table
from policies.sla.fields import Field, Section

TOKENS = {
    "uncached": Key(read_price, "a prompt token that was computed; default 1"),
    "cached": Key(read_price, "a prompt token that came from a cache; default 0.1"),
    "output": Key(read_price, "a token of the answer; default 4"),
}
PRICES = {
    **TOKENS,
    "cache_write": Key(read_price, "a computed prompt token that was written to a cache; default: as `uncached`"),
    "image": Key(read_amount, "an image of the prompt, in the currency or in units; default 0"),
    "second": Key(read_amount, "a second at the backend, in the currency or in units; default 0"),
}
SOME = Named(Table(PRICES), free=True)
OVERRIDES = {
    "models": Key(SOME, "prices of one model, in place of those above"),
    "pools": Key(SOME, "prices at one pool, in place of those above and of its model"),
}
COST = Table(
    {
        **PRICES,
        "currency": Key(
            read_currency, "as USD: prices are those of a million tokens in it, and budgets are written as 20 USD"
        ),
        **OVERRIDES,
        "from": Key(
            Named(Table({**PRICES, **OVERRIDES}), free=True),
            "prices that change on a day, UTC, in place of those above",
        ),
    }
)


def read_cost(field: Field | None, *, pools: Collection[str] = ()) -> PriceList:
    """Prices, with a default for each; those of a day are over those of the days before it."""
    usual = PriceList()
    if field is None:
        return usual
    section = field.section(COST)
    currency = section.read("currency", usual.currency)
    if currency is not None and (missing := [name for name in TOKENS if name not in section]):
        section.entries["currency"].complain(f"needs the prices of a million tokens (write {', '.join(missing)})")
    prices = _over(section, replace(usual, currency=currency), pools)
    if not any(prices.usual) and not prices.models and not prices.pools:
        field.complain("all prices are zero, so no budget is ever used (give at least one price)")
    return replace(prices, later=_later(section, prices, pools))


def _later(section: Section, prices: PriceList, pools: Collection[str]) -> tuple[tuple[float, PriceList], ...]:
    days = []
    for day, entry in (entries.entries() if (entries := section.get("from")) else {}).items():
        try:
            days.append((read_date(day), entry))
        except ValueError as error:
            entry.complain(str(error))
    found = []
    for starts, entry in sorted(days, key=lambda each: each[0]):
        prices = _over(entry.section(Table({**PRICES, **OVERRIDES})), prices, pools)
        found.append((starts, prices))
    return tuple(found)


def _over(section: Section, below: PriceList, pools: Collection[str]) -> PriceList:
    """`below` with what `section` gives in its place."""
    own = _some(section, below.currency)
    usual = own.over(below.usual)
    if "cached" in section or "uncached" in section:
        _compare(section, usual)
    models, of_pools = dict(below.models), dict(below.pools)
    for entries, found in (("models", models), ("pools", of_pools)):
        for name, entry in (given.entries() if (given := section.get(entries)) else {}).items():
            part = entry.section(Table(PRICES))
            if entries == "pools" and name not in pools:
                entry.complain_of_name(name, pools, what="pool")
            some = _some(part, below.currency)
            if some == SomePrices():
                entry.complain(f"has no price (write one of {', '.join(PRICES)})")
            before = found.get(name, SomePrices())
            found[name] = SomePrices(*(old if new is None else new for new, old in zip(some, before, strict=True)))
            _compare(part, found[name].over(usual))
    return replace(below, usual=usual, models=models, pools=of_pools)


def _some(section: Section, currency: str | None) -> SomePrices:
    of_tokens = [section.read_any(name) for name in (*TOKENS, "cache_write")]
    return SomePrices(*of_tokens, *(_parts(section, name, currency) for name in ("image", "second")))


def _parts(section: Section, name: str, currency: str | None) -> int | None:
    """The price `name` in millionths of a unit."""
    amount = section.read_any(name)
    if amount is None:
        return None
    units = amount if currency is None else amount * CURRENCY_UNITS
    parts = units * PRICE_PARTS
    if units > MOST_PER_ONE:
        most = MOST_PER_ONE if currency is None else MOST_PER_ONE // CURRENCY_UNITS
        section.entries[name].complain(f"must be at most {most:,}")
    elif parts != int(parts):
        section.entries[name].complain("has too many decimals (at most 12 with a currency, 6 without)")
    return int(parts)


def _compare(section: Section, prices: Prices) -> None:
    """Doubt a price of cached tokens that is above that of uncached ones."""
    if "cached" in section and prices.cached > prices.uncached:
        section.entries["cached"].doubt(
            f"a cached token costs more than an uncached one ({prices.uncached / PRICE_PARTS:g})"
        )
