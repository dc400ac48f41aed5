"""Intervals and bounds of maintaining pinned prefixes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PrefixRules:
    """Prefixes are checked every `every_s`. A backend that is ill for `patience_s` counts as having lost its cache. At
    most `most_mended` prefixes are repaired at a time. A failed repair is retried after `first_backoff_s`, then at
    growing intervals.

    Each prefix is sent to other routers again every `again_s`, for those that started later, at most `most_sent` at a
    time, because the buffer of news is small. A prefix counts as unmaintained after `unmaintained_s` without
    news of it. After a drop, older versions are ignored for `silent_s`, because they may still be on their way. One
    router knows at most `most_known` prefixes, of all tenants and routers.
    """

    every_s: float = 2.0
    patience_s: float = 10.0
    first_backoff_s: float = 5.0
    most_backoff_s: float = 300.0
    most_mended: int = 64
    again_s: float = 30.0
    unmaintained_s: float = 90.0
    most_sent: int = 1000
    silent_s: float = 10.0
    most_known: int = 10_000
