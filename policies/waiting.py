"""Waiting: may a request without a backend be placed later, and what does it wait for? Pure."""

from __future__ import annotations

from policies.nouns import BackendView, ClusterView, Decision

PLACE = frozenset({"has_room", "under_limit"})
"""Objections that end when other requests there finish, so that it can be foreseen when."""

AWAITS_BLOCKS = "awaits_blocks"
"""The objection to every backend while one computes the beginning of the prompt for another request."""

ROOM = PLACE | {"warming", AWAITS_BLOCKS}
"""Objections that end when other requests finish, or have their first token."""

NO_PREFILL = "no_prefill"
"""The objection to a backend that computes no prompts, while no other one does so for it."""

ABSENT = "absent"
"""The objection to a pool that is to have backends and has none yet."""

HEALTH = frozenset({"healthy", NO_PREFILL, ABSENT})
"""Objections that end when a backend is there, well again, restarted, or no longer draining."""

PASSING = ROOM | HEALTH
"""Objections that may end; all others are permanent."""

NEEDS_PREFILL = "needs_prefill"
"""The objection to a backend that computes no prompts where the request cannot be divided."""

UNREACHED = "unreached"
"""The objection to a backend that never reported its models."""

_ELSEWHERE = frozenset({UNREACHED, "in_pools", "serves_model"})


def is_worth_waiting(decision: Decision) -> bool:
    """Was a backend dropped only for lack of room or health, so that the same request may be placed later?

    Also true if all backends of the model are gone and others were not reached yet: they may be the same, restarted.
    """
    if decision.chosen is not None:
        return False
    reasons = {reason for _, reason in decision.dropped}
    return not reasons.isdisjoint(PASSING) or (UNREACHED in reasons and reasons <= _ELSEWHERE)


def is_outage(decision: Decision) -> bool:
    """Is every backend that could take it ill, so that it is unknown when one will be well?"""
    return is_worth_waiting(decision) and ROOM.isdisjoint(reason for _, reason in decision.dropped)


def would_take(view: ClusterView, decision: Decision) -> list[BackendView]:
    """The backends of `view` that `decision` dropped only for lack of room, or not at all; if there are none, those
    that it dropped for lack of health."""
    if not decision.dropped:
        return list(view.backends)
    reasons = dict(decision.dropped)
    well = [backend for backend in view.backends if reasons.get(backend.name) in {None, *ROOM}]
    return well or [backend for backend in view.backends if reasons[backend.name] in HEALTH]
