"""Peers: what backends that are alike taught about the first beliefs, for those of them that nobody has seen yet."""

from __future__ import annotations

from collections.abc import Sequence

_NEWS_SHARE = 0.5
"""Of the mean, per observation at any of them. What is heard is smooth already; a longer mean would lag behind the
first observations, which move far."""


class Peers:
    """How far from their first beliefs the models of some backends are, coefficient by coefficient: a running mean.

    Without it whoever was never seen would look faster than all others wherever the first belief is too good, and get
    requests whose prompts others have cached; and where it is too bad, it would get none.
    """

    def __init__(self) -> None:
        self.changes = 0
        self.moved: Sequence[float] = ()
        """The mean, as logarithms; empty until something was heard."""

    def __repr__(self) -> str:
        return f"<Peers moved by {', '.join(f'{log:.2f}' for log in self.moved) or 'nothing'}>"

    def hear(self, moved: Sequence[float]) -> None:
        """One of them learnt, and its coefficients are now so far from its first beliefs, as logarithms."""
        share = _NEWS_SHARE if self.moved else 1.0
        known = self.moved or [0.0] * len(moved)
        self.moved = [log + share * (news - log) for log, news in zip(known, moved, strict=True)]
        self.changes += 1
