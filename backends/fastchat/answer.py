"""A FastChat worker's stream: JSON frames that end with a NUL byte, each with all text so far. Pure but for memory.

Source: FastChat's model worker (`generate_stream_gate`), vLLM worker, and constants (`ErrorCode`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from backends.http.frames import FrameDecoder
from backends.http.lenient_json import read_json
from backends.http.nonsense import MISSHAPEN, REQUIRED, counts_in, nonsense, reported_usage
from policies.errors import (
    BackendErred,
    BackendFailed,
    BackendRefused,
    ContextExceeded,
    ExpectedError,
    InvalidRequest,
    Overloaded,
)
from policies.nouns import Delta, Usage

_OF_REQUESTS = (50001, 50002)
"""An internal error, and too little GPU memory: a request may provoke them."""

_HALF = "\ufffd"
"""A worker's placeholder for a character with only its first bytes generated."""


class FastChatAnswer:
    """Fed with the body of a 200. The frame with a `finish_reason` is the last.

    Some workers name none: then the end of the body is the end, if usage came before it. `prompt_tokens` stand in where
    a worker reports no usage.
    """

    def __init__(self, backend: str, *, prompt_tokens: int = 0) -> None:
        self.is_over = False
        self._backend = backend
        self._frames = FrameDecoder(b"\0")
        self._sent, self._whole, self._usage = 0, "", Usage(prompt_tokens, is_guess=True)
        self._has_usage = False

    def __repr__(self) -> str:
        return f"<FastChatAnswer of {self._backend}: {self._sent} letters, {'over' if self.is_over else 'open'}>"

    def feed(self, data: bytes) -> Iterator[Delta]:
        """The Deltas in `data`. Raises BackendFailed at nonsense, and the error of a frame with an error code."""
        for frame in self._frames.feed(data):
            if not self.is_over:
                yield from self._hear(frame)

    def end(self) -> Iterator[Delta]:
        """The Deltas of the end if no reason was given before. Raises BackendFailed if it came too early."""
        if self.is_over:
            return
        if not self._has_usage or self._frames.rest():
            raise BackendErred(f"{self._backend} ended its stream without a reason")
        yield from self._finish("stop")

    def _hear(self, frame: bytes) -> Iterator[Delta]:
        try:
            reply = read_json(frame)
            if reply["error_code"]:
                raise worker_error(self._backend, reply)
            self._whole, finish = str(reply["text"]), reply.get("finish_reason")
            self._note_usage(reply.get("usage"))
        except MISSHAPEN as error:
            raise nonsense(self._backend, frame) from error
        if finish == "abort":
            raise BackendErred(f"{self._backend} broke the answer off")
        certain = len(self._whole.rstrip(_HALF))
        if certain > self._sent:
            yield Delta(text=self._new(certain))
        if finish:
            yield from self._finish(str(finish))

    def _finish(self, reason: str) -> Iterator[Delta]:
        self.is_over = True
        yield Delta(text=self._new(len(self._whole)), finish_reason=reason)
        yield Delta(usage=self._usage)

    def _new(self, end: int) -> str:
        text, self._sent = self._whole[self._sent : end], max(self._sent, end)
        return text

    def _note_usage(self, usage: Any) -> None:
        if counts := counts_in(usage):
            prompt, completion = (counts.get(name, REQUIRED) for name in ("prompt_tokens", "completion_tokens"))
            self._usage = reported_usage(prompt, completion)
            self._has_usage = True


def worker_error(backend: str, reply: Mapping[str, Any]) -> ExpectedError:
    """The error for {text, error_code}."""
    code, message = int(reply["error_code"]), str(reply.get("text"))[:2000]
    if code == 40303:
        return ContextExceeded(message)
    if code in (40001, 40302):
        return InvalidRequest(message)
    if 40000 <= code < 42900:
        return BackendRefused(f"{backend} refused ({code}): {message}")
    if 42900 <= code < 43000:
        return Overloaded(f"{backend} is busy ({code}): {message}")
    kind = BackendErred if code in _OF_REQUESTS else BackendFailed
    return kind(f"{backend} failed ({code}): {message}")
