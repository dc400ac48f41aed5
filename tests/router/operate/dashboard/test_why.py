"""The reasons of a decision in one line."""

from __future__ import annotations

from policies.nouns import Decision, Fetch, PrefillLeg
from router.operate.dashboard.why import why

CHOSEN = Decision("own-0", "default", scores=(("own-0", 1.0),))


def test_kv_from_another_backend_is_named() -> None:
    fetching = Decision(
        "own-0", "default", scores=(("own-0", 1.0),), fetch=Fetch("own-2", 12_288, seconds=0.11, computing_s=0.9)
    )
    line = "the only candidate; fetches 12,288 tokens from own-2 in 0.11 s instead of computing them in 0.9 s"
    assert why(fetching) == line
    apart = Decision("own-0", "default", scores=(("own-0", 1.0),), prefill=PrefillLeg("own-3", 2.0, 1.0))
    assert why(apart) == "the only candidate; prompt computed at own-3"
    assert why(CHOSEN) == "the only candidate"
