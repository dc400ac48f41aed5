"""The parameters for drawing a token where the logits are, on a device, and the drawn token. Torch-free."""

from __future__ import annotations

from typing import NamedTuple

from shards.nouns import TokenLogprobs


class SlotState(NamedTuple):
    """The state of an answer with an `Adjustment` before its next draw here.

    `prompt` and `answer` are its tokens so far, little-endian uint32, as far as penalties count them; `bias` are pairs
    (token, value); `stops` are the tokens that end it.
    """

    prompt: bytes = b""
    answer: bytes = b""
    bias: tuple[tuple[int, float], ...] = ()
    stops: tuple[int, ...] = ()


class Adjustment(NamedTuple):
    """The change of a row's logits before its draw, as in `SamplingParams`. The device counts drawn tokens in `slot`.

    With `begins` the slot forgets what it held. `may_end`: the tokens that end the answer may be drawn.
    """

    slot: int
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    may_end: bool = True
    begins: SlotState | None = None

    @property
    def counts(self) -> bool:
        """Whether the drawn token changes later draws."""
        return self.repetition != 1 or self.presence != 0 or self.frequency != 0


class Drawing(NamedTuple):
    """How a token is drawn: parameters as in `SamplingParams`, and the randomness as (seed, position of the token).

    `temperature` 0 is greedy. If it `is_masked`, the allowed tokens are named later, once the token before it is known.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    position: int = 0
    top_logprobs: int | None = None
    is_masked: bool = False
    adjustment: Adjustment | None = None

    @property
    def truncates(self) -> bool:
        """Whether the likeliest tokens alone may be drawn."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


class Sample(NamedTuple):
    """One drawn token, with logprobs if they were asked for."""

    token_id: int
    logprobs: TokenLogprobs | None = None


GREEDY = Drawing()
