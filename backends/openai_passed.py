"""Answers of OpenAI's dialect that go to a client of that dialect as they came: only what accounting needs is read.

Decoding a chunk of 200 bytes takes 1 µs, as much as looking for `"usage"` in it, so each is decoded and nothing guessed.
Pure but for their own memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from backends.json_members import ABSENT, with_members
from backends.openai_answer import BROKEN, DONE, MISSHAPEN, chunk_in, nonsense
from backends.openai_chunks import FINISHES, usage_of
from backends.openai_errors import error_in_stream
from backends.openai_gathered import Gathered
from backends.sse import SseBlocks, event_in
from policies.errors import BackendFailed, ExpectedError
from policies.nouns import Delta, Request, Usage

MOST_HELD_BYTES = 64 << 10
"""What may wait for the first chunk that says something: comments, and chunks that only name a role."""

ErrorInStream = Callable[[str, Any], ExpectedError]


class Heard(NamedTuple):
    """What one chunk, or a whole answer, tells: how many choices it adds to, and the (choice, reason) that end in it."""

    chunk: dict[str, Any]
    pieces: int
    finishes: list[tuple[int, str]]


class Ear:
    """Hears what accounting needs of one answer of `backend`: pieces, ends, usage, errors.

    Where the server tells no usage, tokens are estimated as `OpenAIAnswer` does. `shown_model` is the name under which
    the client knows the model, where it is another than the server's.
    """

    def __init__(
        self,
        backend: str,
        request: Request,
        *,
        shown_model: str | None = None,
        error_of: ErrorInStream = error_in_stream,
    ) -> None:
        self.backend, self._error_of = backend, error_of
        self._shown_model = shown_model
        self._prompt_tokens, self._pieces = request.prompt_tokens, 0
        self._usage: Usage | None = None

    def __repr__(self) -> str:
        return f"<Ear at {self.backend}: {self._pieces} pieces, {self._usage}>"

    def hear(self, data: bytes) -> Heard:
        """What `data` tells. Raises BackendFailed at nonsense and what was broken off, and what an error means."""
        try:
            chunk = chunk_in(self.backend, data, self._error_of)
            pieces, finishes = 0, []
            for choice in chunk.get("choices") or ():
                pieces += _adds(choice)
                if finish := choice.get("finish_reason"):
                    finishes.append((int(choice.get("index") or 0), FINISHES.get(finish, finish)))
            if chunk.get("usage"):
                self._usage = usage_of(chunk["usage"])
        except MISSHAPEN as error:
            raise nonsense(self.backend, data) from error
        for _, finish in finishes:
            if finish in BROKEN:
                raise BackendFailed(f"{self.backend} broke the answer off ({finish})")
        self._pieces += pieces
        return Heard(chunk, pieces, finishes)

    def usage(self) -> Usage:
        """What the server told, or what was heard."""
        return self._usage or Usage(prompt_tokens=self._prompt_tokens, completion_tokens=self._pieces)

    def shown(self, chunk: Mapping[str, Any]) -> dict[str, Any]:
        """The members of `chunk` that the client is to see otherwise."""
        return {"model": self._shown_model} if self._shown_model is not None and "model" in chunk else {}


class PassedStream:
    """Fed with a stream, gives its own bytes back in as many Deltas as pieces were fed, then the last one with usage.

    Nothing is passed on before the first chunk that says something, so that another backend may still be tried. Without
    `shows_usage` the client did not ask for usage and does not see it.
    """

    def __init__(self, ear: Ear, *, shows_usage: bool) -> None:
        self.is_over = False
        self._ear, self._shows_usage = ear, shows_usage
        self._blocks = SseBlocks()
        self._held, self._held_bytes = list[bytes](), 0
        self._pieces, self._has_begun = 0, False

    def __repr__(self) -> str:
        return f"<PassedStream {self._ear!r}, {'over' if self.is_over else 'open'}>"

    def feed(self, data: bytes) -> Iterator[Delta]:
        """What `data` adds. Raises BackendFailed at nonsense, and what an error event means."""
        for block in self._blocks.feed(data):
            event = event_in(block)
            if self.is_over:
                return
            if event is None:
                self._hold(block)
            elif event.data == DONE:
                yield from self._let_go()
                self.is_over = True
                yield Delta(usage=self._ear.usage(), raw=block)
            else:
                yield from self._take(block, event.data)
        if self._has_begun or self._held_bytes > MOST_HELD_BYTES:
            yield from self._let_go()

    def end(self) -> Iterator[Delta]:
        """Nothing more. Raises BackendFailed if the end came too early."""
        if not self.is_over:
            raise BackendFailed(f"{self._ear.backend} ended its stream without [DONE]")
        return iter(())

    def _take(self, block: bytes, data: bytes) -> Iterator[Delta]:
        chunk, pieces, finishes = self._ear.hear(data)
        changes = self._ear.shown(chunk)
        if chunk.get("usage") and not self._shows_usage:
            changes["usage"] = ABSENT
        if "usage" not in changes or chunk.get("choices"):
            self._hold(_rewritten(data, chunk, changes) if changes else block)
        self._pieces += pieces
        self._has_begun = self._has_begun or pieces > 0
        for choice, finish in finishes:
            yield from self._let_go(choice, finish)

    def _hold(self, block: bytes) -> None:
        self._held.append(block)
        self._held_bytes += len(block)

    def _let_go(self, choice: int = 0, finish: str | None = None) -> Iterator[Delta]:
        """All that is held, as one Delta; that a choice ended is told even if nothing is."""
        if self._held or finish:
            raw, tokens = b"".join(self._held), self._pieces
            self._held, self._held_bytes, self._pieces, self._has_begun = [], 0, 0, True
            yield Delta(choice=choice, finish_reason=finish, raw=raw, tokens=tokens)


class PassedWhole:
    """Fed with an answer in one piece of at most `limit_bytes`, gives it back at its end."""

    def __init__(self, ear: Ear, *, limit_bytes: int = 64 << 20) -> None:
        self.is_over = False
        self._ear, self._limit_bytes = ear, limit_bytes
        self._whole = bytearray()

    def __repr__(self) -> str:
        return f"<PassedWhole {self._ear!r}, {len(self._whole)} bytes>"

    def feed(self, data: bytes) -> Iterator[Delta]:
        """Nothing yet. Raises BackendFailed if the answer is too long."""
        self._whole += data
        if len(self._whole) > self._limit_bytes:
            raise BackendFailed(f"{self._ear.backend} answered more than {self._limit_bytes} bytes")
        return iter(())

    def end(self) -> Iterator[Delta]:
        """The answer, its other ends, its usage. Raises BackendFailed at nonsense, and what an error means."""
        whole = bytes(self._whole)
        chunk, _, finishes = self._ear.hear(whole)
        if not chunk.get("choices"):
            raise nonsense(self._ear.backend, whole)
        changes = self._ear.shown(chunk)
        self.is_over = True
        body = with_members(whole, changes) if changes else whole
        yield from _in_one_piece(body, finishes, self._ear.usage(), is_whole=True)


class GatheredWhole:
    """Fed with a stream, gives Deltas that say how it goes, and at its end the one answer that its chunks add up to."""

    def __init__(self, ear: Ear) -> None:
        self.is_over = False
        self._ear, self._blocks, self._gathered = ear, SseBlocks(), Gathered()

    def __repr__(self) -> str:
        return f"<GatheredWhole {self._ear!r}, {'over' if self.is_over else 'open'}>"

    def feed(self, data: bytes) -> Iterator[Delta]:
        """What `data` adds. Raises BackendFailed at nonsense, and what an error event means."""
        pieces = 0
        for block in self._blocks.feed(data):
            event = event_in(block)
            if event is None or self.is_over:
                continue
            if event.data == DONE:
                self.is_over = True
            else:
                heard = self._ear.hear(event.data)
                pieces += heard.pieces
                self._gathered.add({**heard.chunk, **self._ear.shown(heard.chunk)})
        if pieces:
            yield Delta(tokens=pieces)
        if self.is_over:
            finishes = self._gathered.finishes()
            yield from _in_one_piece(self._gathered.body(), finishes, self._ear.usage(), is_whole=False)

    def end(self) -> Iterator[Delta]:
        """Nothing more. Raises BackendFailed if the end came too early."""
        if not self.is_over:
            raise BackendFailed(f"{self._ear.backend} ended its stream without [DONE]")
        return iter(())


def _in_one_piece(body: bytes, finishes: list[tuple[int, str]], usage: Usage, *, is_whole: bool) -> Iterator[Delta]:
    (choice, finish), *others = finishes or [(0, None)]
    tokens = usage.completion_tokens if is_whole else 0
    yield Delta(body=body, choice=choice, finish_reason=finish, is_whole=is_whole, tokens=tokens)
    for other, reason in others:
        yield Delta(choice=other, finish_reason=reason)
    yield Delta(usage=usage)


def _adds(choice: Mapping[str, Any]) -> bool:
    """Does it add text or anything beside it to its choice?"""
    if "text" in choice:
        return bool(choice["text"])
    said = choice.get("delta") or choice.get("message") or {}
    return bool(said.get("content")) or any(
        value is not None for name, value in said.items() if name not in ("role", "content")
    )


def _rewritten(data: bytes, chunk: Mapping[str, Any], changes: Mapping[str, Any]) -> bytes:
    """The event of `chunk`, whose bytes are `data`, with `changes`.

    A name and a text with plain quotes are no part of any text, so a model's name that is there once, as most servers
    write it, is the chunk's own.
    """
    if changes.keys() == {"model"}:
        for between in (b":", b": "):
            theirs = b'"model"' + between + msgspec.json.encode(chunk["model"])
            if data.count(theirs) == 1:
                ours = b'"model"' + between + msgspec.json.encode(changes["model"])
                return b"data: " + data.replace(theirs, ours) + b"\n\n"
    # the data of several lines have been joined by newlines, which JSON allows and an event's data do not
    return b"data: " + with_members(data, changes).replace(b"\n", b"\ndata: ") + b"\n\n"
