"""Answers of Anthropic's API passed on unchanged to its own clients: only the accounting data is parsed.

Pure but for their own memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from backends.http.exchange import WholeBody
from backends.http.json_members import with_members
from backends.http.lenient_json import read_json
from backends.http.nonsense import MISSHAPEN, nonsense, tokens_of_text
from backends.http.passed import PassedBlocks
from backends.http.sse import block_of
from backends.messages.answer import AnthropicAnswer, error_in_stream, finish_of
from policies.nouns import Delta

_PIECE = "content_block_delta"


class PassedMessage(PassedBlocks):
    """Fed with a stream, gives its own bytes back; message_stop comes last, with usage.

    `shown_model` is the name under which the client knows the model, where it is another than Anthropic's.
    """

    last_word = "message_stop"

    def __init__(self, backend: str, *, shown_model: str | None = None) -> None:
        super().__init__(backend)
        self._shown_model, self._answer = shown_model, AnthropicAnswer(backend)

    def _take(self, block: bytes, event: bytes) -> Sequence[Delta]:
        try:
            kind = read_json(event)["type"]
        except MISSHAPEN as error:
            raise nonsense(self._backend, event) from error
        if kind == _PIECE:
            self._hold(block, pieces=1)
            return ()
        finish: str | None = None
        for delta in self._answer.hear(event):
            finish = delta.finish_reason or finish
            if delta.usage is not None:
                self.is_over = True
                held = [self._let_go()] if self._held else []
                return [*held, Delta(usage=delta.usage, raw=block)]
        self._hold(self._renamed(event) if kind == "message_start" and self._shown_model else block)
        return () if finish is None else [self._let_go(finish=finish)]

    def _renamed(self, event: bytes) -> bytes:
        message = bytes(read_json(event, dict[str, msgspec.Raw])["message"])
        changed = with_members(event, {"message": msgspec.Raw(with_members(message, {"model": self._shown_model}))})
        return block_of(changed, "message_start")


class PassedWholeMessage(WholeBody):
    """Gives a message in one piece back."""

    backend: str
    shown_model: str | None = None

    def read(self, whole: bytes) -> list[Delta]:
        """The message, with its usage."""
        try:
            message = read_json(whole)
            if message["type"] == "error":
                raise error_in_stream(self.backend, message)
            usage = AnthropicAnswer(self.backend).add_usage(message.get("usage"))
            finish = finish_of(message["stop_reason"])
            tokens = usage.completion_tokens or tokens_of_text(_texts(message["content"]))
        except MISSHAPEN as error:
            raise nonsense(self.backend, whole) from error
        body = whole if self.shown_model is None else with_members(whole, {"model": self.shown_model})
        return [Delta(body=body, finish_reason=finish, usage=usage, is_whole=True, tokens=tokens)]


def _texts(content: Iterable[Mapping[str, Any]]) -> Iterator[Any]:
    for block in content:
        yield block.get("text") or block.get("thinking") or str(block.get("input") or "")
