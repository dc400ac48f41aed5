"""The section `cost`: the cost of a token, in the units of the tenants' budgets."""

from __future__ import annotations

from policies.nouns import Prices
from policies.quantities import read_price
from policies.shapes import Key, Table
from policies.sla.fields import Field

COST = Table(
    {
        "uncached": Key(read_price, "a prompt token that was computed; default 1"),
        "cached": Key(read_price, "a prompt token that came from a cache; default 0.1"),
        "output": Key(read_price, "a token of the answer; default 4"),
    }
)


def read_cost(field: Field | None) -> Prices:
    """Prices, with a default for each."""
    usual = Prices()
    if field is None:
        return usual
    section = field.section(COST)
    prices = Prices(
        uncached=section.read("uncached", usual.uncached),
        cached=section.read("cached", usual.cached),
        output=section.read("output", usual.output),
    )
    if not (prices.uncached or prices.cached or prices.output):
        field.complain("all prices are zero, so no budget is ever used (give at least one price)")
    if prices.cached > prices.uncached:
        field.find("cached").doubt(f"a cached token costs more than an uncached one ({prices.uncached:g})")
    return prices
