"""The parameters for drawing a token where the logits are, on a device. Torch-free."""

from __future__ import annotations

from typing import NamedTuple


class Drawing(NamedTuple):
    """How a token is drawn: parameters as in `SamplingParams`, and the randomness as (seed, position of the token).

    `temperature` 0 is greedy.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    position: int = 0


GREEDY = Drawing()
