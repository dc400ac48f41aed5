"""Headers with what is left of a client's limits, in the format of OpenAI's API (its guide "Rate limits").

`x-ratelimit-limit-*`, `-remaining-*` and `-reset-*`, for requests and tokens; a reset is a duration as Go prints it:
`12ms`, `1s`, `6m0s`, `23h47m36.648s`. `Retry-After` is in `router.protocols.status`. `x-pointsman-budget-used` is ours.
"""

from __future__ import annotations

from functools import lru_cache

from policies.quota.budget import Standing

BUDGET_USED = "x-pointsman-budget-used"
"""The header for the budget of which most is used, once 80% of it are."""


def rate_limit_headers(standing: Standing) -> dict[str, str]:
    """Headers for each limit that the client has."""
    headers = {}
    for name, allowance in (("requests", standing.requests), ("tokens", standing.tokens)):
        if allowance is not None:
            headers[f"x-ratelimit-limit-{name}"] = str(allowance.limit)
            headers[f"x-ratelimit-remaining-{name}"] = str(allowance.remaining)
            headers[f"x-ratelimit-reset-{name}"] = _duration(round((allowance.reset_s or 0.0) * 1000))
    if standing.near:
        most = max(standing.near, key=lambda near: near.percent)
        # the name of an end user is the client's own text
        shown = most.meter.descriptor.kind
        headers[BUDGET_USED] = f"{most.percent}% of {most.meter}, {shown}"
    return headers


@lru_cache(maxsize=1024)
def _duration(total_ms: int) -> str:
    """Milliseconds as Go prints a duration: `0s`, `12ms`, `1.5s`, `6m0s`."""
    if 0 < total_ms < 1000:
        return f"{total_ms}ms"
    minutes, ms = divmod(total_ms, 60_000)
    hours, minutes = divmod(minutes, 60)
    text = f"{ms / 1000:g}s"
    if hours:
        return f"{hours}h{minutes}m{text}"
    return f"{minutes}m{text}" if minutes else text
