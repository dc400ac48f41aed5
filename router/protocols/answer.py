"""A whole answer, collected from its Deltas, in no protocol yet."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import msgspec

from backends.openai.gathered import merge_message
from policies.nouns import Delta, TokenLogprob, Usage

_REASONING = ("reasoning_content", "reasoning")
"""Names of the model's reasoning at servers of open models; older and newer vLLM, for two."""


class Head(msgspec.Struct, frozen=True):
    """The fields that all pieces of one answer repeat. `created` is in seconds of Unix time."""

    id: str
    created: int
    model: str


@dataclass(slots=True)
class Answer:
    """One choice of a whole answer, while its Deltas arrive."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    message: dict[str, Any] = field(default_factory=dict)
    finish_reason: str | None = None
    stop: str | None = None
    body: bytes = b""

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self.texts)

    def add(self, delta: Delta) -> None:
        """Add one piece."""
        self.texts.append(delta.text)
        self.token_ids.extend(delta.token_ids)
        self.logprobs.extend(delta.logprobs)
        self.finish_reason = delta.finish_reason or self.finish_reason
        self.stop = delta.stop or self.stop
        self.body = delta.body or self.body
        if delta.message:
            merge_message(self.message, delta.message)


def usage_sum(usages: Iterable[Usage]) -> Usage:
    """The usage of all prompts of a call together."""
    each = list(usages)
    return reduce(Usage.and_, each) if each else Usage()


def refusal_in(message: Mapping[str, Any]) -> str:
    """The text of a refusal in a message or a piece of one; OpenAI's models keep it apart from the answer's text."""
    return str(message.get("refusal") or "")


def thought_in(message: Mapping[str, Any]) -> str:
    """The reasoning in a message or a piece of one."""
    return next((str(message[name]) for name in _REASONING if message.get(name)), "")
