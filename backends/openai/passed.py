"""Answers of OpenAI's dialect, passed to a client of that dialect unchanged: only accounting data is read.

Decoding a chunk of 200 bytes takes less than 1 µs, as long as looking for `"usage"` and `"error"` in it: each is
decoded, and nothing guessed.
Pure but for their own memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from backends.http.errors import error_in_stream
from backends.http.exchange import WholeBody
from backends.http.json_members import ABSENT, with_members, with_more_members
from backends.http.nonsense import MISSHAPEN, nonsense, not_asked_for
from backends.http.passed import PassedBlocks
from backends.http.sse import block_of, data_in
from backends.openai.answer import BROKEN, DONE
from backends.openai.chunks import FINISHES, usage_of
from policies.errors import BackendFailed, ExpectedError
from policies.nouns import Delta, Usage

_OF_THE_LAST = ("system_fingerprint", "timings")
"""What vLLM and llama.cpp write in the last chunk: that of usage if usage was asked for, else the end of a choice."""


class _Choice(msgspec.Struct):
    """The parts of one choice that are read."""

    index: int = 0
    delta: dict[str, Any] | None = None
    message: dict[str, Any] | None = None
    text: str | msgspec.UnsetType | None = msgspec.UNSET
    finish_reason: str | None = None


class Chunk(msgspec.Struct):
    """The parts of one chunk, or of a whole answer, that are read."""

    choices: list[_Choice] | None = None
    usage: dict[str, Any] | None = None
    error: Any = None
    object: Any = None
    model: Any = None
    # set by Ear; a server may write anything under these names
    pieces: Any = 0
    """Number of choices that it adds to."""
    text: Any = ""
    """The text that it adds; None if it adds anything beside text."""
    ends: Any = None
    """The (choice, reason) pairs of choices that end in it."""


_CHUNK = msgspec.json.Decoder(Chunk)


class Ear(msgspec.Struct):
    """Reads the accounting data of one answer of `backend`, with so many `choices`: pieces, ends, usage, errors.

    Where the server tells no usage (`told`), tokens are estimated as `OpenAIAnswer` does. `shown_model` is the name
    under which the client knows the model, where it is another than the server's.
    """

    backend: str
    prompt_tokens: int
    choices: int = 1
    shown_model: str | None = None
    pieces: int = 0
    told: Usage | None = None

    def hear(self, data: bytes) -> Chunk:
        """The chunk in `data`. Raises BackendFailed at nonsense and broken answers, and the error of an error event."""
        try:
            chunk = _CHUNK.decode(data)
            if chunk.error or chunk.object == "error":
                raise error_in_stream(self.backend, chunk.error or msgspec.json.decode(data))
            if chunk.usage:
                self.told = usage_of(chunk.usage)
        except MISSHAPEN as error:
            raise nonsense(self.backend, data) from error
        chunk.pieces, chunk.text, chunk.ends = 0, "", []
        for choice in chunk.choices or ():
            if not 0 <= choice.index < self.choices:
                raise not_asked_for(self.backend, choice.index, self.choices)
            if reason := choice.finish_reason:
                if reason in BROKEN:
                    raise BackendFailed(f"{self.backend} broke the answer off ({reason})")
                chunk.ends.append((choice.index, FINISHES.get(reason, reason)))
            # the text that it adds; None for anything beside text
            added: str | None = choice.text or ""
            if choice.text is msgspec.UNSET:
                piece = choice.delta or choice.message or {}
                added = str(piece.get("content") or "")
                for name, value in piece.items():
                    if value is not None and name not in ("role", "content"):
                        added = None
            if added != "":
                chunk.pieces += 1
                chunk.text = None if added is None or chunk.text is None else chunk.text + added
        self.pieces += chunk.pieces
        return chunk

    def usage(self) -> Usage:
        """The server's report, or the counted pieces."""
        return self.told or Usage(self.prompt_tokens, self.pieces, is_guess=True)

    def shown(self, chunk: Chunk) -> dict[str, Any]:
        """The members of `chunk` that the client is to see otherwise."""
        return {} if self.shown_model is None or chunk.model is None else {"model": self.shown_model}


class PassedStream(PassedBlocks):
    """Fed with a stream, gives its own bytes back; [DONE] comes last, with usage.

    Without `shows_usage` the client did not ask for usage and does not see it; the chunk that ends the answer waits for
    the one that is hidden.
    """

    last_word = "[DONE]"

    def __init__(self, ear: Ear, *, shows_usage: bool) -> None:
        super().__init__(ear.backend)
        self._ear, self._shows_usage = ear, shows_usage
        self._left = ear.choices
        self._last: _Last | None = None

    def end(self) -> Iterator[Delta]:
        """The held bytes. Raises BackendFailed if the end came too early."""
        yield from self._let_last_go()
        yield from super().end()

    def _take(self, block: bytes, content: bytes) -> Sequence[Delta]:
        if content == DONE:
            self.is_over = True
            ended = self._let_last_go()
            held = [self._let_go()] if self._held else []
            return [*ended, *held, Delta(usage=self._ear.usage(), raw=block)]
        try:
            chunk = self._ear.hear(content)
        except ExpectedError:
            self._hold_last()
            # after its end an answer cannot be continued
            self._text = None if self._last is not None else self._text
            raise
        changes, ends = self._ear.shown(chunk) if self._ear.shown_model is not None else {}, chunk.ends
        if chunk.usage is not None and not self._shows_usage:
            changes["usage"] = ABSENT
            if not chunk.choices:
                return self._let_last_go(content)
        shown = _rewritten(content, chunk, changes) if changes else block
        if not ends and self._last is None:
            # all but one of hundreds of chunks
            self._hold(shown, chunk.pieces, chunk.text)
            return ()
        last: Sequence[Delta] = () if self._last is None else self._let_last_go()
        self._left -= len(ends)
        if ends and not self._left and not self._shows_usage:
            self._last = _Last(shown, chunk.pieces, chunk.text, ends)
            return last
        self._hold(shown, chunk.pieces, chunk.text)
        return [*last, *(self._let_go(choice, finish) for choice, finish in ends)] if ends or last else ()

    def _hold_last(self) -> None:
        if self._last is not None:
            self._hold(self._last.block, self._last.pieces, self._last.text)

    def _let_last_go(self, hidden: bytes = b"") -> list[Delta]:
        """The chunk that ended the answer, with other members of the `hidden` chunk of usage."""
        if self._last is None:
            return []
        more = _beside_usage(hidden, self._last.block) if hidden else {}
        if more:
            content = data_in(self._last.block)
            assert content is not None, "it is a chunk"
            self._last = self._last._replace(block=block_of(with_more_members(content, more)))
        self._hold_last()
        ends, self._last = self._last.ends, None
        return [self._let_go(choice, finish) for choice, finish in ends]


class _Last(NamedTuple):
    """The chunk in which the last choice ended: its event, the number of its choices, its text, and the ends."""

    block: bytes
    pieces: int
    text: str | None
    ends: Sequence[tuple[int, str]]


def _beside_usage(hidden: bytes, block: bytes) -> dict[str, msgspec.Raw]:
    """Members of the `hidden` chunk of usage that belong to the chunk in `block`, and that it lacks."""
    there = msgspec.json.decode(data_in(block) or b"{}", type=dict[str, msgspec.Raw])
    more = msgspec.json.decode(hidden, type=dict[str, msgspec.Raw])
    return {name: more[name] for name in _OF_THE_LAST if name in more and name not in there}


class PassedWhole(WholeBody):
    """Gives an answer in one piece back."""

    ear: Ear

    def read(self, whole: bytes) -> list[Delta]:
        """The answer, then its other ends; the last one with usage."""
        ear = self.ear
        chunk = ear.hear(whole)
        if not chunk.choices:
            raise nonsense(ear.backend, whole)
        changes = ear.shown(chunk) if ear.shown_model is not None else {}
        body = with_members(whole, changes) if changes else whole
        usage = ear.told or ear.usage()
        tokens = 0 if usage.is_guess else usage.completion_tokens
        ends: list[tuple[int, str | None]] = chunk.ends or [(0, None)]
        choice, finish = ends[0]
        if len(ends) == 1:
            return [Delta("", choice, finish_reason=finish, usage=usage, body=body, is_whole=True, tokens=tokens)]
        deltas = [Delta("", choice, finish_reason=finish, body=body, is_whole=True, tokens=tokens)]
        for choice, finish in ends[1:]:
            deltas.append(Delta("", choice, finish_reason=finish))
        deltas[-1] = replace(deltas[-1], usage=usage)
        return deltas


def _rewritten(data: bytes, chunk: Chunk, changes: Mapping[str, Any]) -> bytes:
    """The event of `chunk`, with the bytes `data`, after `changes`.

    A name and a text with plain quotes are no part of any text, so a model's name that is there once, as most servers
    write it, is the chunk's own.
    """
    if changes.keys() == {"model"}:
        for between in (b":", b": "):
            theirs = b'"model"' + between + msgspec.json.encode(chunk.model)
            if data.count(theirs) == 1:
                ours = b'"model"' + between + msgspec.json.encode(changes["model"])
                return block_of(data.replace(theirs, ours))
    return block_of(with_members(data, changes))
