"""Expected answer lengths, used for reservations and charges before the real length is known. Pure."""

from __future__ import annotations

_SHARE = 0.05
"""Weight of one answer: the last forty dominate the mean."""

_GUESS_TOKENS = 256


class AnswerLengths:
    """Mean tokens of answers, by tenant and service class, because callers of one class ask for similar things."""

    def __init__(self) -> None:
        self._means: dict[tuple[str, str], float] = {}

    def __repr__(self) -> str:
        return f"<AnswerLengths of {len(self._means)} kinds>"

    def expected(self, tenant: str, service_class: str, *, most: int) -> int:
        """Expected tokens of an answer that has at most `most`; at least one."""
        mean = self._means.get((tenant, service_class), _GUESS_TOKENS)
        return max(1, min(most, round(mean)))

    def learn(self, tenant: str, service_class: str, tokens: int) -> None:
        """Record an answer of `tokens`."""
        kind = (tenant, service_class)
        mean = self._means.get(kind, float(tokens))
        self._means[kind] = mean + _SHARE * (tokens - mean)
