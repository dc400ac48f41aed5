"""Contents of messages in which no text is a control token: the tokens of a mark are drawn from its letters. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from router.ask import Chat

SEAM = "\ufdd0"
"""A text is tokenized in two parts where this stands. No character of Unicode is this one."""

_MARK = re.compile(r"<[^<>\[\]\s]{1,64}>|\[[^<>\[\]\s]{1,64}\]")
"""What marks look like: `<|im_end|>`, `</s>`, `[INST]`. Takes the same time for each character."""


class Inert:
    """Contents without the control tokens of the texts `marks`. Marks of another form stay."""

    def __init__(self, marks: Iterable[str]) -> None:
        self._marks = frozenset(mark for mark in marks if _MARK.fullmatch(mark))

    def __repr__(self) -> str:
        return f"<Inert without {len(self._marks)} marks>"

    def chat(self, chat: Chat) -> Chat:
        """`chat` with inert contents; what the assistant wrote stays, as models write marks themselves."""
        messages = [self._message(message) for message in chat.messages]
        if messages == chat.messages:
            return chat
        parts = {
            at: each if chat.messages[at]["role"] == "assistant" else self._parts(each)
            for at, each in chat.parts.items()
        }
        return replace(chat, messages=messages, parts=parts)

    def text(self, text: str) -> str:
        """`text` with a SEAM in each mark, and none elsewhere."""
        if SEAM in text:
            text = text.replace(SEAM, "\ufffd")
        return _MARK.sub(self._apart, text) if "<" in text or "[" in text else text

    def _apart(self, found: re.Match[str]) -> str:
        mark = found[0]
        return f"{mark[0]}{SEAM}{mark[1:]}" if mark in self._marks else mark

    def _message(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        content = message["content"]
        if message["role"] == "assistant" or not isinstance(content, str):
            return message
        text = self.text(content)
        return message if text == content else {**message, "content": text}

    def _parts(self, parts: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        return [
            {**part, "text": self.text(part["text"])} if isinstance(part.get("text"), str) else part for part in parts
        ]
