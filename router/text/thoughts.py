"""Parses a model's reasoning out of its own text while it streams: `<think>...</think>` before the answer.

For backends that draw tokens and do not know reasoning, such as shards. Qwen3, DeepSeek R1, GLM-4.5 and others write it
so, Magistral between `[THINK]` and `[/THINK]`; some chat templates end the prompt with the opening mark, so that the
answer begins with the reasoning. gpt-oss has channels instead (`router/text/channels.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from backends.base import Backend, Taker
from backends.detokenize import THOUGHT_MARKS
from policies.nouns import Delta, Request
from router.text.channels import CHANNEL, ChannelReader
from router.text.parsed_text import ParsedText, UnreadText, ended_by_calls, namer


@dataclass(frozen=True, slots=True)
class ThoughtSyntax:
    """How reasoning may stand in one answer: in channels, or between the marks `opens` and `closes`. `is_open`: the
    prompt ends within it.
    """

    is_open: bool = False
    has_channels: bool = False
    opens: str = "<think>"
    closes: str = "</think>"


def thoughts_in(template: str) -> ThoughtSyntax | None:
    """The syntax that a chat template teaches its model; None if it teaches none."""
    if CHANNEL in template:
        return ThoughtSyntax(has_channels=True)
    marks = next(((opens, closes) for opens, closes in THOUGHT_MARKS if closes in template), None)
    return None if marks is None else ThoughtSyntax(opens=marks[0], closes=marks[1])


def thoughts_behind(syntax: ThoughtSyntax, prompt_end: str, continued: str = "") -> ThoughtSyntax:
    """`syntax` for the answer to a prompt that ends with `prompt_end`, or that goes on from the text `continued`."""
    if syntax.has_channels:
        return syntax
    is_within = continued.rfind(syntax.opens) > continued.rfind(syntax.closes)
    return replace(syntax, is_open=is_within or prompt_end.rstrip().endswith(syntax.opens))


def reading_thoughts(to: Taker, backend: Backend, request: Request, syntax: ThoughtSyntax) -> Taker:
    """A Taker that parses reasoning out of the text of `backend` for `to`, unless the backend parses it itself.

    An answer that is held to a grammar has none.
    """
    described = backend.describe()
    if described is None or not described.speaks_tokens or request.sampling.grammar is not None:
        return to
    return _ThoughtTaker(to, request.id, syntax)


class _ThoughtTaker:
    """Gives `to` each Delta with its reasoning apart from its text."""

    def __init__(self, to: Taker, request_id: str, syntax: ThoughtSyntax) -> None:
        self._to, self._request_id, self._syntax = to, request_id, syntax
        self._choices: dict[int, ThoughtReader | ChannelReader] = {}

    def __repr__(self) -> str:
        return f"<_ThoughtTaker with {self._choices}>"

    def take(self, delta: Delta) -> bool:
        return self._to.take(self._read(delta))

    async def ready(self) -> None:
        await self._to.ready()

    def _read(self, delta: Delta) -> Delta:
        if delta.computed_tokens is not None:
            return delta
        reader = self._choices.get(delta.choice)
        if reader is None:
            reader = self._choices[delta.choice] = self._reader(delta.choice)
        parsed = reader.push(delta.text, is_last=delta.finish_reason is not None)
        if delta.finish_reason == "stop":
            parsed.text += reader.unanswered
        read = parsed.changes(delta)
        return ended_by_calls(read) if reader.calls else read

    def _reader(self, choice: int) -> ThoughtReader | ChannelReader:
        if self._syntax.has_channels:
            return ChannelReader(namer(self._request_id, choice))
        return ThoughtReader(self._syntax)


class ThoughtReader:
    """Parses one choice. The joined output does not depend on how the text is cut into pieces.

    White space within the marks at both ends, and behind the closing one, belongs to them. Reasoning that the answer's
    end cuts off is reasoning. Only the first text of an answer can be reasoning.
    """

    calls = 0

    def __init__(self, syntax: ThoughtSyntax) -> None:
        self._opens, self._closes = syntax.opens, syntax.closes
        self._is_thinking, self._is_over = False, False
        self._is_open = syntax.is_open
        self._held, self._unread = "", UnreadText()
        self._has_begun = False
        self._thoughts: list[str] = []

    def __repr__(self) -> str:
        state = "over" if self._is_over else "thinking" if self._is_thinking else "before"
        return f"<ThoughtReader {state}, {len(self._held)} characters held>"

    @property
    def unanswered(self) -> str:
        """All of the reasoning if no text stands behind it: a model that ends so by itself has answered at once."""
        return "".join(self._thoughts)

    def push(self, text: str, *, is_last: bool = False) -> ParsedText:
        """The reasoning and the text that are final once `text` is added; `is_last`: no more comes."""
        if self._is_over and self._has_begun and not self._held:
            return ParsedText(text)
        held = self._unread.with_held(self._held, text, is_last=is_last)
        if held is None:
            return ParsedText()
        self._held = held
        if not self._is_thinking and not self._is_over:
            self._look_for_opening(is_last=is_last)
        thought = self._thought(is_last=is_last) if self._is_thinking else ""
        text = self._text(is_last=is_last) if self._is_over else ""
        if text:
            self._thoughts.clear()
        elif thought:
            self._thoughts.append(thought)
        return ParsedText(text, thought)

    def _look_for_opening(self, *, is_last: bool) -> None:
        start = self._held.lstrip()
        if start.startswith(self._opens):
            self._held, self._is_thinking = start.removeprefix(self._opens), True
        elif not is_last and self._opens.startswith(start):
            return
        elif self._is_open:
            self._is_thinking = True
        else:
            # an answer without reasoning keeps its white space
            self._is_over, self._has_begun = True, True

    def _thought(self, *, is_last: bool) -> str:
        if not self._has_begun:
            self._held = self._held.lstrip()
        end = self._held.find(self._closes)
        if end >= 0:
            thought, self._held = self._held[:end].rstrip(), self._held[end + len(self._closes) :]
            self._is_thinking, self._is_over, self._has_begun = False, True, False
            return thought
        certain = len(self._held) if is_last else _certain(self._held, self._closes)
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


def _certain(text: str, closes: str) -> int:
    """The characters of reasoning that are no part of its closing mark, nor white space that may stand before it."""
    for length in range(min(len(closes) - 1, len(text)), 0, -1):
        if closes.startswith(text[-length:]):
            return len(text[:-length].rstrip())
    return len(text.rstrip())
