"""The common part of SGLang's and LMDeploy's `/generate`, for their stand-ins."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, NamedTuple

from tests.standins.standin import StandIn


class Step(NamedTuple):
    """One token of an answer: all text and ids so far, and why it ended, if it did."""

    text: str
    ids: list[int]
    finish: str | None


async def steps(standin: StandIn, most: int) -> AsyncIterator[Step]:
    """The answer token by token; a token's id is its character's code point."""
    text = ""
    length = min(most, len(standin.text))
    async for piece in standin.pieces(most):
        text += piece
        finish = standin.finish(most) if len(text) == length else None
        yield Step(text, [ord(letter) for letter in text], finish)


def logprobs(ids: list[int]) -> list[list[Any]]:
    """[log-probability, id, text] of each of `ids`."""
    return [[-0.5, token, chr(token)] for token in ids]
