"""What the data-parallel ranks of one server share."""

from __future__ import annotations

from dataclasses import dataclass, field

from policies.health import Health
from router.fleet.cluster.flights import Flight


@dataclass(eq=False, slots=True)
class Server:
    """One server: its `health`, and what its operators want of it. Most servers run their model in one rank.

    `weight` is the share of the load that each rank gets beside others' weights of 1. `is_kept_out`: its operators want
    no new requests there. `is_suspect`: it shows no sign of life, but is not ill yet. `silent_since`: when the first of
    the probes began that it has not answered; None if it has answered the last one. `trial` is the one request that it
    may have, at any rank, while it is on trial. `ranks` are the names of its members, rank 0 first.
    """

    health: Health
    weight: float = 1.0
    is_kept_out: bool = False
    is_suspect: bool = False
    silent_since: float | None = None
    trial: Flight | None = None
    ranks: list[str] = field(default_factory=list)
