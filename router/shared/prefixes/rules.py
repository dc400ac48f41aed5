"""How patiently prefixes are looked after, and how many."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PrefixRules:
    """Every `every_s` it is seen whether prefixes are where they should be. A backend that is ill for `patience_s` has
    lost what it had. At most `most_mended` are made again at a time. What could not be is tried after
    `first_backoff_s`, then ever less often.

    Other routers are told of a prefix again every `again_s`, for those that came later, of `most_told` at a time, since
    what waits to be told has little room. If nobody tells of one for `untold_s`, nobody looks after it any more. One
    that was dropped is not heard of again for `silent_s`: what was said of it before may still be on its way. One
    router knows of at most `most_known` prefixes, of all tenants and routers.
    """

    every_s: float = 2.0
    patience_s: float = 10.0
    first_backoff_s: float = 5.0
    most_backoff_s: float = 300.0
    most_mended: int = 64
    again_s: float = 30.0
    untold_s: float = 90.0
    most_told: int = 1000
    silent_s: float = 10.0
    most_known: int = 10_000
