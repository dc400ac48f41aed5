"""The sentences that explain a decision."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from policies.nouns import Decision
from policies.objections import in_words
from policies.predict import MARGINAL_COST

_MOST_NAMED = 3


def why(decision: Decision) -> str:
    """Reasons for the decision, in sentences: the chosen backend and its scores, the runner-up, the backends that each
    filter dropped."""
    return " ".join(_sentences(decision))


def _sentences(decision: Decision) -> Iterator[str]:
    yield _chosen(decision)
    if decision.prefill is not None:
        yield f"{decision.prefill.backend} computes the prompt."
    elif decision.fetch is not None:
        fetch = decision.fetch
        instead = f"instead of computing them in {fetch.computing_s:.2g} s"
        yield f"It fetches {fetch.tokens:,} tokens from {fetch.backend} in {fetch.seconds:.2g} s {instead}."
    if decision.dropped:
        yield f"Left out: {', '.join(_dropped(decision))}."
    if decision.left_out:
        yield f"Not considered: {decision.left_out:,} others."


def _chosen(decision: Decision) -> str:
    if decision.awaits is not None:
        return f"{decision.awaits} is full, and worth waiting for."
    if decision.chosen is None:
        return "No backend can take it."
    if len(decision.scores) == 1:
        return f"{decision.chosen} is the only candidate."
    scores = {score: value for name, score, value in decision.details if name == decision.chosen and value is not None}
    if not scores:
        return f"{decision.chosen} was picked without scores."
    if scores.keys() == {MARGINAL_COST}:
        return f"{decision.chosen} costs least{_second(decision)}."
    named = ", ".join(f"{score} {value:.2f}" for score, value in list(scores.items())[:_MOST_NAMED])
    return (
        f"{decision.chosen} scores {dict(decision.scores).get(decision.chosen, 0.0):.2f} ({named}){_second(decision)}."
    )


def _second(decision: Decision) -> str:
    """The best of the others, by its total."""
    others = [(total, name) for name, total in decision.scores if name != decision.chosen]
    if not others:
        return ""
    total, name = max(others)
    return f", before {name} with {total:.2f}"


def _dropped(decision: Decision) -> Iterator[str]:
    names = defaultdict(list)
    for name, reason in decision.dropped:
        names[reason].append(name)
    for reason, backends in names.items():
        dropped = backends[0] if len(backends) == 1 else f"{len(backends):,} backends"
        yield f"{dropped} {in_words(reason)}"
