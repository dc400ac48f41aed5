"""Parses Ollama's answers: JSON lines of `/api/chat` and `/api/generate` as Deltas, and errors. Pure but for memory.

Source: Ollama's docs/api.md; docs/streaming ("application/x-ndjson"); docs/errors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from backends.http.errors import BUSY, details_of, error_of
from backends.http.frames import FrameDecoder
from backends.http.halves import Halves
from backends.http.lenient_json import logprob_of, read_json
from backends.http.nonsense import MISSHAPEN, nonsense, reported_usage
from backends.openai.calls import CallPieces
from backends.openai.parts import content_of_parts
from policies.errors import BackendErred, ExpectedError, Overloaded
from policies.nouns import Delta, TokenLogprob, Usage

_FINISHES = {"load": "stop", "unload": "stop", "": "stop"}


class OllamaAnswer:
    """Fed with the body of a 200. The line with `done` is the last, and has the usage.

    `prompt_tokens` stand in if Ollama reports none. `counted` is the prompt's length if it was counted: if
    Ollama then reports less than half, as versions do that leave out cached tokens, the rest was cached.
    `one_call`: calls of tools after the first are left out, since Ollama cannot be asked for one at a time.
    A call without an id gets one that is not in `taken_ids`.
    """

    def __init__(
        self,
        backend: str,
        *,
        prompt_tokens: int = 0,
        counted: int | None = None,
        one_call: bool = False,
        taken_ids: frozenset[str] = frozenset(),
    ) -> None:
        self.is_over, self._one_call = False, one_call
        self._backend, self._prompt_tokens, self._counted = backend, prompt_tokens, counted
        self._lines, self._calls, self._strict = FrameDecoder(b"\n"), 0, CallPieces(taken_ids)
        self._halves = Halves()

    def __repr__(self) -> str:
        return f"<OllamaAnswer of {self._backend}: {'over' if self.is_over else 'open'}>"

    def feed(self, data: bytes) -> Iterator[Delta]:
        """The Deltas in `data`. Raises BackendFailed for invalid lines, and the error in a line."""
        for line in self._lines.feed(data):
            if not self.is_over:
                yield from self._hear(self._halves.joined(line))

    def end(self) -> Iterator[Delta]:
        """The Deltas of an unfinished last line. Raises BackendFailed if the answer ended too early."""
        if not self.is_over and (line := self._lines.rest()).strip():
            yield from self._hear(line)
        if not self.is_over:
            raise BackendErred(f"{self._backend} ended its stream before it was done")

    def _hear(self, line: bytes) -> Iterator[Delta]:
        try:
            reply = read_json(line)
            if reply.get("error"):
                raise _error_in_stream(self._backend, str(reply["error"]))
            delta = self._delta(reply)
            last = self._last(reply) if reply.get("done") else ()
        except MISSHAPEN as error:
            raise nonsense(self._backend, line) from error
        if delta != Delta():
            yield delta
        yield from last

    def _delta(self, reply: Mapping[str, Any]) -> Delta:
        message = reply.get("message")
        if message is None:
            message = {**reply, "content": reply["response"]}
        beside: dict[str, Any] = {}
        if message.get("thinking"):
            beside["reasoning"] = message["thinking"]
        calls = message.get("tool_calls") or ()
        if self._one_call:
            calls = calls[: 1 - min(1, self._calls)]
        if calls:
            self._calls += len(calls)
            beside["tool_calls"] = self._strict.read(list(map(_whole_call, calls)))
        content = message.get("content") or ""
        if not isinstance(content, str):
            content, thoughts = content_of_parts(content)
            beside |= thoughts
        return Delta(
            text=content,
            logprobs=tuple(_logprobs(reply.get("logprobs") or ())),
            message=beside or None,
        )

    def _last(self, reply: Mapping[str, Any]) -> tuple[Delta, ...]:
        self.is_over = True
        reason = str(reply.get("done_reason") or "")
        finish = _FINISHES.get(reason, reason)
        counts = reported_usage(reply.get("prompt_eval_count"), reply.get("eval_count", 0))
        prompt = counts.prompt_tokens
        cached = 0
        if self._counted is not None and 2 * prompt < self._counted:
            cached, prompt = self._counted - prompt, self._counted
        usage = Usage(
            prompt or self._prompt_tokens, counts.completion_tokens, cached, is_guess=counts.is_guess or not prompt
        )
        ended = "tool_calls" if finish == "stop" and self._calls else finish
        return (Delta(finish_reason=ended), Delta(usage=usage))


def _whole_call(call: Mapping[str, Any]) -> dict[str, Any]:
    """A call without Ollama's index, which starts anew with every line in some versions: each call is whole."""
    function = call["function"]
    return {"id": call.get("id"), "function": {"name": function["name"], "arguments": function.get("arguments") or {}}}


def error_of_ollama(backend: str, status: int, body: bytes, headers: Mapping[str, str]) -> ExpectedError:
    """The error for an HTTP `status` with its `body` {"error": text}; a full queue is 503 without a time to return."""
    message = details_of(body).get("message")
    inner = details_of(str(message).encode()) if str(message).startswith("{") else {}
    # the runner's error comes as JSON within JSON
    text = str(inner.get("message") or message or f"status {status}")
    return error_of(backend, status, msgspec.json.encode({"error": {"message": text}}), headers)


def _error_in_stream(backend: str, message: str) -> ExpectedError:
    """The error in a line; without a status. Its runner may have died of the request."""
    if BUSY.search(message):
        return Overloaded(f"{backend} is busy: {message[:2000]}")
    return BackendErred(f"{backend} broke the answer off: {message[:2000]}")


def _logprobs(entries: Sequence[Mapping[str, Any]]) -> Iterator[TokenLogprob]:
    """Ollama reports texts of tokens, not their ids."""
    for entry in entries:
        top = tuple(_logprobs(entry.get("top_logprobs") or ()))
        yield TokenLogprob(0, str(entry["token"]), logprob_of(entry["logprob"]), top)
