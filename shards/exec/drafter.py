"""What guesses the next tokens of an answer. Torch-free."""

from __future__ import annotations

from typing import Protocol

_KEPT_SHARE = 0.9
"""Share of the experience that is kept per further guess: about the last ten count."""

_KEPT_UNTRIED = 0.98
"""The same per token without a guess: experience is forgotten after some 50 tokens, so that guessing is tried again."""


class Drafter(Protocol):
    """Guesses the next tokens of one answer, and observes the drawn ones.

    Every guess is compared with the token that is drawn there. So it knows how often its guesses are right.
    """

    @property
    def is_model(self) -> bool:
        """Whether a model computes its guesses."""
        ...

    @property
    def has_guess(self) -> bool:
        """Whether `draft` has tokens, or could compute some."""
        ...

    @property
    def chance(self) -> float:
        """The estimated chance that the next token is the first of `draft`."""
        ...

    @property
    def later_chance(self) -> float:
        """The estimated chance that a guess behind a right one is right."""
        ...

    @property
    def guess_s(self) -> float:
        """Seconds that each guess takes before it can be verified."""
        ...

    def note(self, token_id: int) -> None:
        """Record the drawn token `token_id`."""
        ...

    def draft(self, tokens: int) -> tuple[int, ...]:
        """The next `tokens` tokens, as guessed; fewer if there are no more guesses."""
        ...

    def release(self) -> None:
        """Give back the memory of KV that it holds: its answer waits, or has ended."""
        ...


class Trust:
    """The share of recent guesses that were right, with `prior` as one further guess."""

    def __init__(self, prior: float) -> None:
        self._prior = prior
        self._right = self._guesses = 0.0

    def __repr__(self) -> str:
        return f"Trust({self.share:.2f})"

    @property
    def share(self) -> float:
        """The estimated chance that the next guess is right, in (0, 1)."""
        return (self._right + self._prior) / (self._guesses + 1.0)

    def learn(self, is_right: bool) -> None:
        """Record one more guess."""
        self._right = _KEPT_SHARE * self._right + is_right
        self._guesses = _KEPT_SHARE * self._guesses + 1.0

    def forget(self) -> None:
        """Record a token, or whatever else is counted, without a guess: the prior counts a little more."""
        self._right *= _KEPT_UNTRIED
        self._guesses *= _KEPT_UNTRIED
