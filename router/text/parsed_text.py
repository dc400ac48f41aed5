"""What readers make of an answer's text while it streams: text, reasoning and calls. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from policies.nouns import Delta

_SLICE_CHARACTERS = 1 << 10
_LITTLE_CHARACTERS = 256
_PARTS = 4

MOST_HELD_CHARACTERS = 1 << 16
"""Most text that waits for the rest of a possible call; longer text passes as text."""


@dataclass(slots=True)
class ParsedText:
    """Text, reasoning and pieces of calls that later text does not change. Pieces have the shape of OpenAI's
    `tool_calls` deltas, at most one for each call.
    """

    text: str = ""
    thought: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)

    def changes(self, delta: Delta) -> Delta:
        """`delta` with this in place of its text; itself if that is the same."""
        if not self.thought and not self.calls and self.text == delta.text:
            return delta
        message = delta.message or {}
        if self.thought:
            message = {**message, "reasoning_content": self.thought}
        if self.calls:
            message = {**message, "tool_calls": self.calls}
        return msgspec.structs.replace(delta, text=self.text, message=message or None)

    def call(self, number: int, call_id: str, name: str) -> None:
        """Call `number` begins."""
        function = {"name": name, "arguments": ""}
        self.calls.append({"index": number, "id": call_id, "type": "function", "function": function})

    def argue(self, number: int, arguments: str) -> None:
        """Add to the arguments of call `number`, the newest one."""
        if not self.calls or self.calls[-1]["index"] != number:
            self.calls.append({"index": number, "function": {"arguments": ""}})
        self.calls[-1]["function"]["arguments"] += arguments


class UnreadText:
    """Text that came and that its reader has not looked at: a reader that holds much waits for some more, since it
    looks at all of it each time.
    """

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._size = 0

    def __repr__(self) -> str:
        return f"<UnreadText {self._size} characters>"

    def with_held(self, held: str, text: str, *, is_last: bool) -> str | None:
        """`held` and all that came since, `text` at the end; None: wait for more."""
        if not self._pieces and len(held) <= _LITTLE_CHARACTERS:
            return held + text
        self._pieces.append(text)
        self._size += len(text)
        is_little = self._size * _PARTS < len(held) <= MOST_HELD_CHARACTERS - self._size
        if is_little and not is_last:
            return None
        whole = held + "".join(self._pieces)
        self._pieces, self._size = [], 0
        return whole


def in_slices(push: Callable[[str, bool], ParsedText], text: str, *, is_last: bool) -> ParsedText:
    """What `push` makes of `text`, and of whether that is the last: of a long one slice by slice, since a reader looks
    at all that it holds for each mark.
    """
    if len(text) <= _SLICE_CHARACTERS:
        return push(text, is_last)
    slices = sliced(text)
    return joined([push(piece, is_last and piece is slices[-1]) for piece in slices])


def sliced(text: str) -> list[str]:
    """`text` in the slices that a reader looks at; at least one."""
    starts = range(0, len(text) or 1, _SLICE_CHARACTERS)
    return [text[start : start + _SLICE_CHARACTERS] for start in starts]


def joined(each: list[ParsedText]) -> ParsedText:
    """All of `each` as one, which takes them over."""
    if len(each) == 1:
        return each[0]
    arguments: dict[int, list[str]] = {}
    calls: dict[int, dict[str, Any]] = {}
    for call in (call for parsed in each for call in parsed.calls):
        calls.setdefault(call["index"], call)
        arguments.setdefault(call["index"], []).append(call["function"]["arguments"])
    for number, pieces in arguments.items():
        calls[number]["function"]["arguments"] = "".join(pieces)
    texts = "".join(parsed.text for parsed in each), "".join(parsed.thought for parsed in each)
    return ParsedText(*texts, list(calls.values()))


def ended_by_calls(delta: Delta) -> Delta:
    """`delta` with the reason of an answer that has made calls, if it ends one."""
    return msgspec.structs.replace(delta, finish_reason="tool_calls") if delta.finish_reason == "stop" else delta


def namer(request_id: str, choice: int) -> Callable[[int], str]:
    """Makes the ids of the calls in one choice, by their number."""
    # nine letters or digits: Mistral's chat templates refuse the ids of any other length
    return lambda call: hashlib.sha256(f"{request_id} {choice} {call}".encode()).hexdigest()[:9]


def overlap(text: str, mark: str) -> int:
    """Number of characters at the end of `text` that begin `mark`."""
    if text[-1:] not in mark:
        return 0
    longest = min(len(text), len(mark) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(mark[:size])), 0)
