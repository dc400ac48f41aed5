"""A mirror: a share of a rule's requests is sent to another pool too, to compare it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mirror:
    """A `share` of the requests, above 0 and at most 1, also goes to `pool`; the answers there are dropped."""

    pool: str
    share: float
