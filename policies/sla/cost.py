"""The section `cost`: what a token costs, in the units of the tenants' budgets."""

from __future__ import annotations

from policies.nouns import Prices
from policies.quantities import read_price
from policies.shapes import Key, Table
from policies.sla.fields import Field

COST = Table(
    {
        "uncached": Key(read_price, "a token of the prompt that had to be computed; 1 without it"),
        "cached": Key(read_price, "a token of the prompt that came from a cache; 0.1 without it"),
        "output": Key(read_price, "a token of the answer; 4 without it"),
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
        field.complain("nothing costs anything, so no budget is ever used (give at least one price)")
    if prices.cached > prices.uncached:
        field.find("cached").doubt(f"a cached token costs more than an uncached one ({prices.uncached:g})")
    return prices
