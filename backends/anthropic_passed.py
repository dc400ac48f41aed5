"""Answers of Anthropic's API that go to its own clients as they came: only what accounting needs is read.

Pure but for their own memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from backends.anthropic_answer import MISSHAPEN, AnthropicAnswer, error_in_stream, finish_of, misshapen
from backends.json_members import with_members
from backends.openai_passed import MOST_HELD_BYTES
from backends.sse import SseBlocks, block_of, data_in
from policies.errors import BackendFailed, ExpectedError
from policies.nouns import Delta

_PIECE = "content_block_delta"


class PassedMessage:
    """Fed with a stream, gives its own bytes back; message_stop comes last, with usage.

    Nothing is passed on before the first piece of a block. `shown_model` is the name under which the client knows the
    model, where it is another than Anthropic's.
    """

    def __init__(self, backend: str, *, shown_model: str | None = None) -> None:
        self.is_over = False
        self._backend, self._shown_model = backend, shown_model
        self._blocks, self._answer = SseBlocks(), AnthropicAnswer(backend)
        self._held = list[bytes]()
        self._pieces, self._may_go, self._is_out = 0, False, False

    def __repr__(self) -> str:
        return f"<PassedMessage of {self._backend}: {'over' if self.is_over else 'open'}>"

    def feed(self, data: bytes) -> Iterator[Delta]:
        """What `data` adds. Raises BackendFailed at nonsense, and what an error event means."""
        try:
            for block in self._blocks.feed(data):
                if self.is_over:
                    return
                said = data_in(block)
                if said is None:
                    self._held.append(block)
                else:
                    yield from self._take(block, said)
        except ExpectedError:
            # who has seen the beginning sees what came before the error, too
            if self._is_out and self._held:
                yield self._let_go()
            raise
        if self._held and (self._may_go or sum(map(len, self._held)) > MOST_HELD_BYTES):
            yield self._let_go()

    def end(self) -> Iterator[Delta]:
        """Nothing more. Raises BackendFailed if the end came too early."""
        if not self.is_over:
            raise BackendFailed(f"{self._backend} ended its stream without message_stop")
        return iter(())

    def _take(self, block: bytes, said: bytes) -> Iterator[Delta]:
        try:
            event = msgspec.json.decode(said)
            kind = event["type"]
        except MISSHAPEN as error:
            raise misshapen(self._backend, said) from error
        if kind == _PIECE:
            self._pieces, self._may_go = self._pieces + 1, True
            self._held.append(block)
            return
        for delta in self._answer.feed(b"data: " + said + b"\n\n"):
            if delta.usage is not None:
                self.is_over = True
                if self._held:
                    yield self._let_go()
                yield Delta(usage=delta.usage, raw=block)
            elif delta.finish_reason is not None:
                self._held.append(block)
                yield self._let_go(delta.finish_reason)
                return
        if not self.is_over:
            self._held.append(self._renamed(said) if kind == "message_start" and self._shown_model else block)

    def _let_go(self, finish: str | None = None) -> Delta:
        """All that is held, as one Delta."""
        raw, tokens, self._pieces = b"".join(self._held), self._pieces, 0
        self._held.clear()
        self._may_go = self._is_out = True
        return Delta(finish_reason=finish, raw=raw, tokens=tokens)

    def _renamed(self, said: bytes) -> bytes:
        message = bytes(msgspec.json.decode(said, type=dict[str, msgspec.Raw])["message"])
        changed = with_members(said, {"message": msgspec.Raw(with_members(message, {"model": self._shown_model}))})
        return block_of(changed, "message_start")


class PassedWholeMessage:
    """Fed with a message in one piece of at most `limit_bytes`, gives it back at its end."""

    def __init__(self, backend: str, *, shown_model: str | None = None, limit_bytes: int = 64 << 20) -> None:
        self.is_over = False
        self._backend, self._shown_model, self._limit_bytes = backend, shown_model, limit_bytes
        self._whole = bytearray()

    def __repr__(self) -> str:
        return f"<PassedWholeMessage of {self._backend}: {len(self._whole)} bytes>"

    def feed(self, data: bytes) -> Iterator[Delta]:
        """Nothing yet. Raises BackendFailed if the message is too long."""
        self._whole += data
        if len(self._whole) > self._limit_bytes:
            raise BackendFailed(f"{self._backend} answered more than {self._limit_bytes} bytes")
        return iter(())

    def end(self) -> Iterator[Delta]:
        """The message, then its usage. Raises BackendFailed at nonsense, and what an error means."""
        whole, answer = bytes(self._whole), AnthropicAnswer(self._backend)
        try:
            message: dict[str, Any] = msgspec.json.decode(whole)
            if message["type"] == "error":
                raise error_in_stream(self._backend, message)
            usage = answer.told(message["usage"])
            finish = finish_of(message["stop_reason"])
        except MISSHAPEN as error:
            raise misshapen(self._backend, whole) from error
        self.is_over = True
        body = whole if self._shown_model is None else with_members(whole, {"model": self._shown_model})
        yield Delta(body=body, finish_reason=finish, is_whole=True, tokens=usage.completion_tokens)
        yield Delta(usage=usage)
