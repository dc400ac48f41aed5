"""One sentence for each decision."""

from __future__ import annotations

from collections import Counter

from policies.nouns import Decision

_MOST_NAMED = 3


def why(decision: Decision) -> str:
    """Reasons for the decision: the chosen backend's scores, the runner-up, and the number dropped by each filter."""
    left_out = f"{decision.left_out} not considered" if decision.left_out else ""
    parts = (_chosen(decision), _second(decision), _moved(decision), _dropped(decision), left_out)
    return "; ".join(part for part in parts if part)


def _chosen(decision: Decision) -> str:
    if decision.awaits is not None:
        return f"waits for {decision.awaits}"
    if decision.chosen is None:
        return "no backend can take it"
    if len(decision.scores) == 1:
        return "the only candidate"
    scores = [
        f"{score} {value:.2f}"
        for name, score, value in decision.details
        if name == decision.chosen and value is not None
    ]
    return ", ".join(scores[:_MOST_NAMED]) or "picked without scores"


def _moved(decision: Decision) -> str:
    """The KV that comes from another backend."""
    if decision.prefill is not None:
        return f"prompt computed at {decision.prefill.backend}"
    if decision.fetch is None:
        return ""
    fetch = decision.fetch
    instead = f"instead of computing them in {fetch.computing_s:.2g} s"
    return f"fetches {fetch.tokens:,} tokens from {fetch.backend} in {fetch.seconds:.2g} s {instead}"


def _second(decision: Decision) -> str:
    totals = dict(decision.scores)
    others = [(total, name) for name, total in totals.items() if name != decision.chosen]
    if decision.chosen not in totals or not others:
        return ""
    total, name = max(others)
    return f"{totals[decision.chosen]:.2f} before {name} {total:.2f}"


def _dropped(decision: Decision) -> str:
    reasons = Counter(reason for _, reason in decision.dropped)
    named = {reason: next(name for name, given in decision.dropped if given == reason) for reason in reasons}
    dropped = (named[reason] if count == 1 else f"{count}" for reason, count in reasons.items())
    return ", ".join(f"{backends} dropped by {reason}" for backends, reason in zip(dropped, reasons, strict=True))
