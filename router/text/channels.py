"""Parses the channels of gpt-oss's answers while they stream (OpenAI's "harmony" format): reasoning, text and calls.

An answer is messages of the form `<|start|>assistant<|channel|>NAME<|message|>...<|end|>`, and the prompt ends within
the first one's head. The channel `analysis` is reasoning; a message to `functions.NAME` is a call with its arguments in
JSON, ended by `<|call|>`; all others are text.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from router.text.parsed_text import ParsedText, in_slices, overlap

CHANNEL = "<|channel|>"
_BODY, _START = "<|message|>", "<|start|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", _START)
_END = re.compile("|".join(map(re.escape, _ENDS)))
_HEADS = (CHANNEL, _START, " to=")
_NAME = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")
_TOOL = re.compile(r"to=functions\.([\w.-]+)")

MOST_HEAD_CHARACTERS = 1 << 12
"""A longer head is text."""


class ChannelReader:
    """Parses one choice. The joined output does not depend on how the text is cut into pieces.

    Text without a head, as an answer that is held to a grammar, stays text. `id_of` gives the ids of calls by number.
    """

    def __init__(self, id_of: Callable[[int], str]) -> None:
        self.calls, self.unanswered = 0, ""
        self._id_of, self._held = id_of, ""
        self._is_in_head, self._is_analysis, self._is_call = True, False, False

    def __repr__(self) -> str:
        return f"<ChannelReader {self.calls} calls, {len(self._held)} characters held>"

    def push(self, text: str, *, is_last: bool = False) -> ParsedText:
        """Everything that is final once `text` is added; `is_last`: no more text comes."""
        return in_slices(self._push, text, is_last=is_last)

    def _push(self, text: str, is_last: bool) -> ParsedText:
        self._held += text
        parsed = ParsedText()
        while self._head(parsed, is_last=is_last) if self._is_in_head else self._body(parsed, is_last=is_last):
            pass
        return parsed

    def _head(self, parsed: ParsedText, *, is_last: bool) -> bool:
        """The head of a message, up to its body; whether to go on."""
        held = self._held
        may_be_head = any(held.startswith(mark) or mark.startswith(held) for mark in _HEADS)
        end = held.find(_BODY, 0, MOST_HEAD_CHARACTERS)
        is_too_long = may_be_head and end < 0 and len(held) > MOST_HEAD_CHARACTERS
        if not may_be_head or is_too_long:
            self._is_in_head = self._is_analysis = self._is_call = False
            if is_too_long:
                # the mark before it begins no other head
                self._give(parsed, held[0])
                self._held = held[1:]
            return True
        if end < 0:
            # a head that the answer's end cuts off says nothing
            self._held = "" if is_last else held
            return False
        head = held[:end]
        name, tool = _NAME.search(head), _TOOL.search(head)
        self._held, self._is_in_head = held[end + len(_BODY) :], False
        self._is_analysis, self._is_call = tool is None and name is not None and name[1] == "analysis", tool is not None
        if tool is not None:
            parsed.call(self.calls, self._id_of(self.calls), tool[1])
            self.calls += 1
        return True

    def _body(self, parsed: ParsedText, *, is_last: bool) -> bool:
        """The body of a message, up to a mark that ends it; whether to go on."""
        held = self._held
        found = _END.search(held)
        if found is None:
            certain = len(held) if is_last else len(held) - max(overlap(held, end) for end in _ENDS)
            self._give(parsed, held[:certain])
            self._held = held[certain:]
            return False
        self._give(parsed, held[: found.start()])
        self._held = held[found.start() if found[0] == _START else found.end() :]
        self._is_in_head = True
        return bool(self._held)

    def _give(self, parsed: ParsedText, text: str) -> None:
        if self._is_call and text:
            parsed.argue(self.calls - 1, text)
        elif self._is_analysis:
            parsed.thought += text
        else:
            parsed.text += text
