"""The reasons of a decision in sentences."""

from __future__ import annotations

from policies.nouns import Decision, Fetch, PrefillLeg
from router.operate.dashboard.why import why

CHOSEN = Decision("own-0", "default", scores=(("own-0", 1.0),))
BOTH = (("own-0", 1.0), ("own-1", 0.82))


def test_kv_from_another_backend_is_named() -> None:
    fetching = Decision(
        "own-0", "default", scores=(("own-0", 1.0),), fetch=Fetch("own-2", 12_288, seconds=0.11, computing_s=0.9)
    )
    fetched = "It fetches 12,288 tokens from own-2 in 0.11 s instead of computing them in 0.9 s."
    assert why(fetching) == f"own-0 is the only candidate. {fetched}"
    apart = Decision("own-0", "default", scores=(("own-0", 1.0),), prefill=PrefillLeg("own-3", 2.0, 1.0))
    assert why(apart) == "own-0 is the only candidate. own-3 computes the prompt."
    assert why(CHOSEN) == "own-0 is the only candidate."


def test_the_runner_up_is_named_beside_the_scores() -> None:
    cheapest = Decision("own-0", "default", scores=BOTH, details=(("own-0", "marginal_cost", 1.0),))
    assert why(cheapest) == "own-0 costs least, before own-1 with 0.82."
    scored = (("own-0", "prefix", 1.0), ("own-0", "balance", 0.5), ("own-1", "prefix", 0.0))
    weighed = Decision("own-0", "mixed", scores=BOTH, details=scored)
    assert why(weighed) == "own-0 scores 1.00 (prefix 1.00, balance 0.50), before own-1 with 0.82."
    assert why(Decision("own-0", "turns", scores=BOTH)) == "own-0 was picked without scores."


def test_backends_that_filters_drop_are_counted_by_reason() -> None:
    dropped = (("own-1", "healthy"), ("spot-0", "in_pools"), ("spot-1", "in_pools"), ("own-2", "of_a_plugin"))
    decision = Decision("own-0", "default", dropped, scores=(("own-0", 1.0),), left_out=1200)
    assert why(decision) == (
        "own-0 is the only candidate. Left out: own-1 not well, or draining, 2 backends outside the rule's pools, "
        "own-2 by of_a_plugin. Not considered: 1,200 others."
    )


def test_a_request_without_a_backend_waits_or_has_none() -> None:
    assert why(Decision(None, "default")) == "No backend can take it."
    assert why(Decision(None, "default", awaits="own-1")) == "own-1 is full, and worth waiting for."
