"""Guesses the next tokens of an answer that repeats its prompt or itself. Torch-free."""

from __future__ import annotations

from shards.exec.lookup import GRAM_TOKENS, Gram, PromptIndex

_KEPT_SHARE = 0.9
"""Of what was learnt, per further guess: about the last ten count."""

_PRIOR_FIRST = 0.3
_PRIOR_LATER = 0.7
"""How likely a guess is to be right before any was seen: the first one of a match, and one behind a right one."""


class Trust:
    """The share of recent guesses that were right, drawn towards `prior`, which counts like one guess."""

    def __init__(self, prior: float) -> None:
        self._prior = prior
        self._right = self._guesses = 0.0

    def __repr__(self) -> str:
        return f"Trust({self.share:.2f})"

    @property
    def share(self) -> float:
        """How likely the next guess is to be right, in (0, 1)."""
        return (self._right + self._prior) / (self._guesses + 1.0)

    def learn(self, is_right: bool) -> None:
        """One more guess was right, or was not."""
        self._right = _KEPT_SHARE * self._right + is_right
        self._guesses = _KEPT_SHARE * self._guesses + 1.0


class Drafter:
    """Follows one answer. Where its last three tokens stood before, whatever came then is its guess.

    It guesses at every token, whether or not anybody asks, and sees what is drawn: so it knows how far it may be
    trusted, and relearns it for free where nothing is drafted. `first` is the trust in the first guess of a match,
    `later` in those behind a right one. A token takes 2 us, and memory for one gram.
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
        return f"Drafter({len(self._output)} drawn, guesses from {self._source}, {self.first!r}, {self.later!r})"

    @property
    def has_guess(self) -> bool:
        """Did the last tokens stand somewhere before?"""
        return self._source is not None

    @property
    def chance(self) -> float:
        """How likely the next token is what `draft` says."""
        return self.later.share if self._is_running else self.first.share

    def note(self, token_id: int) -> None:
        """`token_id` was drawn."""
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
        """The next `tokens` tokens, as guessed; none without a guess. A match that reaches the end begins again."""
        if self._source is None:
            return ()
        period = len(self._index) + len(self._output) - self._source
        drafted: list[int] = []
        for ahead in range(tokens):
            drafted.append(self._at(self._source + ahead) if ahead < period else drafted[ahead - period])
        return tuple(drafted)

    def _at(self, position: int) -> int:
        prompt_tokens = len(self._index)
        if position < prompt_tokens:
            token: int = self._index.tokens[position]
            return token
        return self._output[position - prompt_tokens]
