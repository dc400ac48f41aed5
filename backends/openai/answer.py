"""One answer of a server that speaks OpenAI's dialect, from its bytes to Deltas. Pure but for its own memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
from msgspec.structs import replace

from backends.http.errors import error_in_stream
from backends.http.event_answer import EventAnswer
from backends.http.nonsense import not_asked_for
from backends.openai.chunks import deltas_of
from backends.openai.continued import trailing_space, whole_usage
from policies.errors import BackendFailed, ExpectedError
from policies.nouns import Beginning, Delta, Request, Usage

DONE = b"[DONE]"
BROKEN = ("abort", "error")
"""Finish reasons of broken answers: vLLM, SGLang and LMDeploy send them if another caller stopped the request."""


class OpenAIAnswer(EventAnswer):
    """Fed with the body of a 200, streamed (server-sent events) or whole (one JSON object of at most `limit_bytes`).

    Usage comes last and once, as a Delta of its own. Where the server tells none, tokens are estimated: the prompt's as
    the request has them, one for each Delta with text or a message. `error_of` says what an error in the body means.
    `most_choices` is for answers to several prompts at once; else there are as many as the request asks for.
    Of an answer with a `beginning` from elsewhere, usage covers that too.
    """

    last_word = "[DONE]"

    def __init__(
        self,
        backend: str,
        request: Request,
        *,
        is_streamed: bool,
        limit_bytes: int = 64 << 20,
        error_of: Callable[[str, Any], ExpectedError] = error_in_stream,
        most_choices: int | None = None,
        beginning: Beginning | None = None,
    ) -> None:
        super().__init__(backend)
        self._error_of = error_of
        self._is_streamed, self._limit_bytes = is_streamed, limit_bytes
        self._whole = bytearray()
        self._usage: Usage | None = None
        self._prompt_tokens, self._pieces = request.prompt_tokens, 0
        self._choices = range(most_choices or request.sampling.choices)
        self._beginning, self._request = beginning, request
        # white space at the end of the beginning is not in the prompt, and is drawn a second time
        self._repeated = "" if beginning is None else trailing_space(beginning.text)

    def __repr__(self) -> str:
        return f"<OpenAIAnswer of {self._backend}: {self._pieces} pieces, {'over' if self.is_over else 'open'}>"

    def feed(self, data: bytes) -> Iterator[Delta]:
        """The Deltas in `data`. Raises BackendFailed at nonsense, and the error of an error event."""
        if self._is_streamed:
            yield from super().feed(data)
            return
        self._whole += data
        if len(self._whole) > self._limit_bytes:
            raise BackendFailed(f"{self._backend} answered more than {self._limit_bytes} bytes")

    def end(self) -> Iterator[Delta]:
        """The Deltas of the end of the body. Raises BackendFailed if it came too early."""
        if self._is_streamed or self.is_over:
            yield from super().end()
            return
        deltas = list(self.hear(bytes(self._whole)))
        all_tokens = 0 if self._usage is None else self._usage.completion_tokens
        for delta in deltas:
            yield replace(delta, is_whole=True, tokens=all_tokens)
            # the first has them all, whichever choice they are of
            all_tokens = 0
        yield from self._close()

    def _read(self, data: bytes) -> Iterator[Delta]:
        if data == DONE:
            yield from self._close()
            return
        for delta in deltas_of(chunk_in(self._backend, data, self._error_of)):
            if delta.usage is not None:
                self._usage = delta.usage
                continue
            if delta.finish_reason in BROKEN:
                raise BackendFailed(f"{self._backend} broke the answer off ({delta.finish_reason})")
            if delta.choice not in self._choices:
                raise not_asked_for(self._backend, delta.choice, len(self._choices))
            self._pieces += bool(delta.text or delta.message)
            yield self._unrepeated(delta) if self._repeated else delta

    def _close(self) -> Iterator[Delta]:
        self.is_over = True
        usage = self._usage or Usage(self._prompt_tokens, self._pieces, is_guess=True)
        yield Delta(usage=usage if self._beginning is None else whole_usage(usage, self._beginning, self._request))

    def _unrepeated(self, delta: Delta) -> Delta:
        """`delta` without the white space that the client has already."""
        text = delta.text
        while self._repeated and text and text[0] == self._repeated[0]:
            text, self._repeated = text[1:], self._repeated[1:]
        self._repeated = "" if text else self._repeated
        return replace(delta, text=text)


def chunk_in(backend: str, data: bytes, error_of: Callable[[str, Any], ExpectedError]) -> dict[str, Any]:
    """The chunk, or whole answer, in `data`. Raises `error_of` of an error, and MISSHAPEN at nonsense."""
    chunk: dict[str, Any] = msgspec.json.decode(data)
    error = chunk.get("error") or (chunk if chunk.get("object") == "error" else None)
    if error:
        raise error_of(backend, error)
    return chunk
