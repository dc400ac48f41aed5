"""What the objections of filters to backends mean, in words."""

from __future__ import annotations

from collections.abc import Iterable

from policies.waiting import ABSENT, AWAITS_BLOCKS, NEEDS_PREFILL, NO_PREFILL, UNREACHED

_WORDS = {
    "healthy": "not well, or draining",
    "serves_model": "without the model",
    "fits_context": "with too short a context",
    "may_not_fit": "perhaps with too short a context",
    "under_limit": "with as many requests as it takes",
    "has_room": "without room",
    "in_pools": "outside the rule's pools",
    "avoided": "failed at this request before, or kept free of batches",
    "warming": "still warming up",
    "incapable": "without what the request needs",
    "only_prefills": "only computes prompts for other backends",
    "no_endpoint": "without an endpoint that the gateway knows",
    "other_dialect": "of another dialect",
    "not_in_subset": "outside the gateway's subset",
    "not_taken": "not taken by the gateway",
    UNREACHED: "not reached yet",
    ABSENT: "without any backend yet",
    AWAITS_BLOCKS: "without a prefix that is being computed now",
    NEEDS_PREFILL: "computes no prompts itself",
    NO_PREFILL: "computes no prompts, and no other backend does so for it",
}


def in_words(objection: str) -> str:
    """What is wrong with a backend that has this objection, to be read after its name; of a filter that another
    distribution has added, "by" and the filter's name."""
    return _WORDS.get(objection, f"by {objection}")


def worded(objections: Iterable[str]) -> dict[str, str]:
    """Each of `objections` once, with its words."""
    return {objection: in_words(objection) for objection in dict.fromkeys(objections)}
