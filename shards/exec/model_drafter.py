"""One answer as a draft model follows it. Torch-free: `shards.draft_model` computes the guesses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shards.exec.drafter import Trust
from shards.kv.keys import BLOCK_TOKENS
from shards.kv.table import BlockTable
from shards.sched.drafts import MOST_DRAFTED

if TYPE_CHECKING:
    from shards.exec.sampling import Sampler

MOST_LAG = 8
"""Known tokens without KV that the first guess may compute as well; more of them are computed before, in chunks."""

_PRIOR = 0.7
"""Prior chance that a guess of the model is right."""


@dataclass(slots=True)
class DraftPace:
    """What all drafters of a draft model know: how often its guesses are right, and what one takes beside others."""

    trust: Trust = field(default_factory=lambda: Trust(_PRIOR))
    guess_s: float = 0.0


class ModelDrafter:
    """Guesses what the draft model drew. The first `computed_tokens` of prompt and answer have KV of that model, in the
    blocks of `table`; the `known_tokens` lead.

    `sampler` draws as the answer's own does, with the same random numbers: so guesses are right as often as they can be
    where tokens are sampled. It begins with the trust that the other drafters have, and is of no use for a sequence
    that comes near `most_tokens`.
    """

    is_model = True

    def __init__(
        self, pace: DraftPace, sampler: Sampler, table: BlockTable, *, prompt_tokens: int, most_tokens: int
    ) -> None:
        self._pace, self._trust = pace, Trust(pace.trust.share)
        self.sampler, self.table = sampler, table
        self._most_tokens, self._is_over, self._has_guessed = most_tokens, False, False
        self.known_tokens, self.computed_tokens, self.drawn = prompt_tokens, 0, 0
        self._guesses: tuple[int, ...] = ()

    def __repr__(self) -> str:
        return f"ModelDrafter({self.computed_tokens} of {self.known_tokens} computed, {self._trust!r}, {self.table!r})"

    @property
    def may_guess(self) -> bool:
        """Whether the model can follow this answer."""
        return not self._is_over and self.known_tokens + MOST_DRAFTED < self._most_tokens

    @property
    def is_behind(self) -> bool:
        """Whether it could guess if its KV were computed."""
        return self.may_guess and self.known_tokens - self.computed_tokens > MOST_LAG

    @property
    def has_guess(self) -> bool:
        """Whether it could guess now."""
        return self.may_guess and self.known_tokens - self.computed_tokens <= MOST_LAG

    @property
    def chance(self) -> float:
        """The estimated chance that its next guess is right."""
        return self._trust.share

    @property
    def later_chance(self) -> float:
        """The same: it knows no more about the first guess than about the next ones."""
        return self._trust.share

    @property
    def guess_s(self) -> float:
        """The time of one more guess beside those of other answers."""
        return self._pace.guess_s

    def note(self, token_id: int) -> None:
        """Record the drawn token `token_id`. KV of right guesses stays, and that of others is overwritten."""
        self.known_tokens += 1
        self.drawn += 1
        if not self._guesses:
            self._trust.forget()
            return
        is_right = self._guesses[0] == token_id
        self._trust.learn(is_right)
        self._pace.trust.learn(is_right)
        rest = self._guesses[1:]
        # the last guess was drawn and never read
        self.computed_tokens += bool(is_right and rest)
        self._guesses = rest if is_right else ()

    def lacks(self, tokens: int) -> bool:
        """Whether it has fewer guesses than that."""
        return len(self._guesses) < tokens

    def guess(self, token_ids: Sequence[int]) -> None:
        """Take `token_ids` as guesses: the KV of all known tokens and of these but the last is computed."""
        self.computed_tokens = self.known_tokens
        self._guesses = tuple(token_ids)
        self._has_guessed = True

    def draft(self, tokens: int) -> tuple[int, ...]:
        """Its first `tokens` guesses."""
        return self._guesses[:tokens]

    def release(self) -> None:
        """Give its blocks back; it is behind then."""
        self.table.release()
        self.computed_tokens, self._guesses = 0, ()

    def end(self) -> None:
        """Give its blocks back, and guess no more. An answer without any guess lets the others' experience fade."""
        if not (self._is_over or self._has_guessed):
            self._pace.trust.forget()
        self._is_over = True
        self.release()

    def check(self) -> None:
        """Assert that its blocks hold what is computed."""
        self.table.check()
        held = len(self.table)
        assert self.computed_tokens <= self.known_tokens, "more is computed than is known"
        assert self.computed_tokens <= held * BLOCK_TOKENS, "KV has no block"
