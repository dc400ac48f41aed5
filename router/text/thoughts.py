"""Parses a model's reasoning out of its own text while it streams: `<think>...</think>` before the answer.

For backends that draw tokens and do not know reasoning, such as shards. Qwen3, DeepSeek R1, GLM-4.5 and others write it
so; some chat templates end the prompt with the opening mark, so that the answer begins with the reasoning.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from backends.base import Backend, Taker
from policies.nouns import Beginning, Delta, Request

OPENS, CLOSES = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class ThoughtSyntax:
    """How reasoning may stand in one answer. `is_open`: the prompt ends within it."""

    is_open: bool = False


def thinks(template: str) -> bool:
    """Whether a chat template knows the marks of reasoning."""
    return CLOSES in template


def thoughts_behind(prompt_end: str) -> ThoughtSyntax:
    """The syntax of the answer to a prompt that ends with `prompt_end`."""
    return ThoughtSyntax(is_open=prompt_end.rstrip().endswith(OPENS))


def reading_thoughts(
    to: Taker, backend: Backend, request: Request, syntax: ThoughtSyntax, beginning: Beginning | None
) -> Taker:
    """A Taker that parses reasoning out of the text of `backend` for `to`, unless the backend parses it itself.

    An answer that is held to a grammar has none. One that another backend began is still within its reasoning if none
    of its text is known.
    """
    described = backend.describe()
    if described is None or not described.speaks_tokens or request.sampling.grammar is not None:
        return to
    if beginning is not None:
        if beginning.text:
            return to
        syntax = ThoughtSyntax(is_open=True)
    return _ThoughtTaker(to, syntax)


class _ThoughtTaker:
    """Gives `to` each Delta with its reasoning apart from its text."""

    def __init__(self, to: Taker, syntax: ThoughtSyntax) -> None:
        self._to, self._syntax = to, syntax
        self._choices: dict[int, ThoughtReader] = {}

    def __repr__(self) -> str:
        return f"<_ThoughtTaker with {self._choices}>"

    def take(self, delta: Delta) -> bool:
        """See Taker."""
        return self._to.take(self._read(delta))

    async def ready(self) -> None:
        """See Taker."""
        await self._to.ready()

    def _read(self, delta: Delta) -> Delta:
        if delta.computed_tokens is not None:
            return delta
        reader = self._choices.get(delta.choice)
        if reader is None:
            reader = self._choices[delta.choice] = ThoughtReader(self._syntax)
        thought, text = reader.push(delta.text, is_last=delta.finish_reason is not None)
        if not thought and text == delta.text:
            return delta
        message = {**(delta.message or {}), "reasoning_content": thought} if thought else delta.message
        return msgspec.structs.replace(delta, text=text, message=message)


class ThoughtReader:
    """Parses one choice. The joined output does not depend on how the text is cut into pieces.

    White space within the marks at both ends, and behind the closing one, belongs to them. Reasoning that the answer's
    end cuts off is reasoning. Only the first text of an answer can be reasoning.
    """

    def __init__(self, syntax: ThoughtSyntax) -> None:
        self._is_thinking, self._is_over = syntax.is_open, False
        self._held = ""
        self._has_begun = False

    def __repr__(self) -> str:
        state = "over" if self._is_over else "thinking" if self._is_thinking else "before"
        return f"<ThoughtReader {state}, {len(self._held)} characters held>"

    def push(self, text: str, *, is_last: bool = False) -> tuple[str, str]:
        """The reasoning and the text that are final once `text` is added; `is_last`: no more comes."""
        if self._is_over and self._has_begun and not self._held:
            return "", text
        self._held += text
        if not self._is_thinking and not self._is_over:
            self._look_for_opening(is_last=is_last)
        thought = self._thought(is_last=is_last) if self._is_thinking else ""
        return thought, self._text(is_last=is_last) if self._is_over else ""

    def _look_for_opening(self, *, is_last: bool) -> None:
        start = self._held.lstrip()
        if start.startswith(OPENS):
            self._held, self._is_thinking = start.removeprefix(OPENS), True
        elif is_last or not OPENS.startswith(start):
            # an answer without reasoning keeps its white space
            self._is_over, self._has_begun = True, True

    def _thought(self, *, is_last: bool) -> str:
        if not self._has_begun:
            self._held = self._held.lstrip()
        end = self._held.find(CLOSES)
        if end >= 0:
            thought, self._held = self._held[:end].rstrip(), self._held[end + len(CLOSES) :]
            self._is_thinking, self._is_over, self._has_begun = False, True, False
            return thought
        certain = len(self._held) if is_last else _certain(self._held)
        thought, self._held = self._held[:certain], "" if is_last else self._held[certain:]
        self._has_begun = self._has_begun or bool(thought)
        return thought.rstrip() if is_last else thought

    def _text(self, *, is_last: bool) -> str:
        """The text behind the reasoning; white space before it is held until it is known what follows."""
        if not self._has_begun:
            self._held = self._held.lstrip()
        if not self._held and not is_last:
            return ""
        text, self._held, self._has_begun = self._held, "", True
        return text


def _certain(text: str) -> int:
    """The characters of reasoning that are no part of its closing mark, nor white space that may stand before it."""
    for length in range(min(len(CLOSES) - 1, len(text)), 0, -1):
        if CLOSES.startswith(text[-length:]):
            return len(text[:-length].rstrip())
    return len(text.rstrip())
