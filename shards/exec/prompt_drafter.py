"""Guesses the next tokens of an answer that repeats its prompt or itself. Torch-free."""

from __future__ import annotations

from shards.exec.drafter import Trust
from shards.exec.lookup import GRAM_TOKENS, Gram, PromptIndex

_PRIOR_FIRST = 0.3
_PRIOR_LATER = 0.7
"""Prior chance that a guess is right: the first guess of a match, and a guess behind a right one."""


class PromptDrafter:
    """Follows one answer. If its last three tokens have occurred before, the tokens that followed then are its guess.

    It guesses at every token, even without a caller, and observes the drawn tokens. So it knows its own success rate,
    and keeps learning at no cost while nothing is drafted. `first` is the trust in the first guess of a match, `later`
    in guesses behind a right one. A token takes 2 us, and memory for one gram.
    """

    def __init__(self, index: PromptIndex) -> None:
        self._index = index
        self._output: list[int] = []
        self._latest: dict[Gram, int] = {}
        self._gram: Gram = tuple(index.tokens[-GRAM_TOKENS:])
        self._source: int | None = None
        self._is_running = False
        self.first, self.later = Trust(_PRIOR_FIRST), Trust(_PRIOR_LATER)

    def __repr__(self) -> str:
        return f"PromptDrafter({len(self._output)} drawn, guesses from {self._source}, {self.first!r}, {self.later!r})"

    @property
    def is_model(self) -> bool:
        """False: it only looks tokens up."""
        return False

    @property
    def has_guess(self) -> bool:
        """Have the last tokens occurred before?"""
        return self._source is not None

    @property
    def chance(self) -> float:
        """The estimated chance that the next token is the first of `draft`."""
        return self.later.share if self._is_running else self.first.share

    @property
    def later_chance(self) -> float:
        """The estimated chance that a guess behind a right one is right."""
        return self.later.share

    @property
    def guess_s(self) -> float:
        """0: nothing is computed."""
        return 0.0

    def note(self, token_id: int) -> None:
        """Record the drawn token `token_id`."""
        if self._source is not None:
            is_right = self._at(self._source) == token_id
            (self.later if self._is_running else self.first).learn(is_right)
            self._is_running = is_right
            self._source = self._source + 1 if is_right else None
        self._output.append(token_id)
        gram = (*self._gram[1 - GRAM_TOKENS :], token_id)
        self._gram = gram
        if len(gram) == GRAM_TOKENS:
            if self._source is None:
                found = self._latest.get(gram)
                self._source = self._index.find(gram) if found is None else found
            self._latest[gram] = len(self._index) + len(self._output)

    def draft(self, tokens: int) -> tuple[int, ...]:
        """The next `tokens` tokens, as guessed; none without a guess. A match that reaches the end starts over."""
        if self._source is None:
            return ()
        period = len(self._index) + len(self._output) - self._source
        drafted: list[int] = []
        for ahead in range(tokens):
            drafted.append(self._at(self._source + ahead) if ahead < period else drafted[ahead - period])
        return tuple(drafted)

    def release(self) -> None:
        """Do nothing: it has no KV."""

    def _at(self, position: int) -> int:
        prompt_tokens = len(self._index)
        if position < prompt_tokens:
            token: int = self._index.tokens[position]
            return token
        return self._output[position - prompt_tokens]
