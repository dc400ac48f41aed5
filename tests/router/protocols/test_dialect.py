from __future__ import annotations

import pytest

from policies.quota.budget import Allowance, Standing
from router.protocols.dialect import rate_limit_headers


def test_remaining_limits_have_openais_format() -> None:
    standing = Standing(requests=Allowance(60, 59, 1), tokens=Allowance(150_000, 149_984, 360))
    assert rate_limit_headers(standing) == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "59",
        "x-ratelimit-reset-requests": "1s",
        "x-ratelimit-limit-tokens": "150000",
        "x-ratelimit-remaining-tokens": "149984",
        "x-ratelimit-reset-tokens": "6m0s",
    }


def test_what_is_not_limited_has_no_header() -> None:
    assert rate_limit_headers(Standing(cost=Allowance(1, 1, 0))) == {}
    assert set(rate_limit_headers(Standing(tokens=Allowance(9, 9, 0)))) == {
        f"x-ratelimit-{what}-tokens" for what in ("limit", "remaining", "reset")
    }


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (0.012, "12ms"),
        (0.9996, "1s"),
        (1, "1s"),
        (1.5, "1.5s"),
        (59.9999, "1m0s"),
        (60, "1m0s"),
        (252.172, "4m12.172s"),
        (3600, "1h0m0s"),
        (86_256.648, "23h57m36.648s"),
    ],
)
def test_a_reset_reads_as_go_prints_a_duration(seconds: float, text: str) -> None:
    headers = rate_limit_headers(Standing(tokens=Allowance(9, 9, seconds)))
    assert headers["x-ratelimit-reset-tokens"] == text
