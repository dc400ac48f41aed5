"""Answers of OpenAI's dialect that are passed on to a client of the dialect unchanged.

Only accounting data is read of them. Decoding a chunk of 200 bytes takes less than 1 µs, as long as looking for
`"usage"` and `"error"` in it: each is decoded, and nothing guessed. Pure but for their own memory.

Source: OpenAI API reference, "The chat completion chunk object", "The chat completion object", "The completion object".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec.structs import replace

from backends.http.errors import error_in_stream
from backends.http.exchange import WholeBody
from backends.http.json_members import ABSENT, with_members, with_more_members
from backends.http.lenient_json import read_json
from backends.http.nonsense import MISSHAPEN, MOST_TOKENS, nonsense, not_asked_for
from backends.http.passed import PassedBlocks
from backends.http.sse import block_of, data_in
from backends.nesting import has_many_values
from backends.openai.answer import BROKEN, DONE, FINISHES, told_usage
from policies.errors import BackendErred, ExpectedError
from policies.nouns import Delta, Usage

_OF_THE_LAST = ("system_fingerprint", "timings")
"""What vLLM and llama.cpp write in the last chunk: that of usage if usage was asked for, else the end of a choice."""


class _Choice(msgspec.Struct):
    """The parts of one choice that are read."""

    index: int | None = 0
    delta: dict[str, Any] | None = None
    message: dict[str, Any] | None = None
    text: str | msgspec.UnsetType | None = msgspec.UNSET
    finish_reason: str | None = None


class Chunk(msgspec.Struct):
    """The parts of one chunk, or of a whole answer, that are read."""

    choices: list[_Choice] | None = None
    usage: Any = None
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


class _Text(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a chunk adds to a chat, if that is text alone. Some servers write null for what they do not add."""

    content: str = ""
    role: Any = None
    refusal: None = None
    reasoning: None = None
    reasoning_content: None = None
    tool_calls: None = None
    function_call: None = None


_NO_TEXT = _Text()


class _TextChoice(msgspec.Struct):
    """A choice that goes on with text."""

    index: Literal[0] = 0
    delta: _Text = _NO_TEXT
    message: None = None
    text: str | msgspec.UnsetType = msgspec.UNSET
    finish_reason: None = None


class _TextChunk(msgspec.Struct):
    """A chunk that adds text to the only choice, and nothing else that is read. As `Ear.hear` reads it, in one step."""

    choices: tuple[_TextChoice]
    object: Literal["chat.completion.chunk", "text_completion"] = "chat.completion.chunk"
    usage: None = None
    error: None = None


_TEXT_CHUNK = msgspec.json.Decoder(_TextChunk)

_Count = Annotated[int, msgspec.Meta(ge=0, lt=MOST_TOKENS)]


class _Cached(msgspec.Struct, forbid_unknown_fields=True):
    """What OpenAI tells of a prompt's tokens, where it is no more than this."""

    cached_tokens: _Count | None = None


class _Counts(msgspec.Struct, forbid_unknown_fields=True):
    """The usage of most answers."""

    prompt_tokens: Annotated[int, msgspec.Meta(ge=1, lt=MOST_TOKENS)]
    completion_tokens: _Count
    total_tokens: Any = None
    prompt_tokens_details: _Cached | None = None
    completion_tokens_details: None = None
    reasoning_tokens: _Count | None = None
    """SGLang's."""


class _UsualEnd(msgspec.Struct):
    """The only choice of most answers, as far as it is read."""

    finish_reason: Literal["stop", "length", "tool_calls"]
    index: Literal[0] = 0


class _UsualWhole(msgspec.Struct):
    """An answer in one piece as nearly all are. As `Ear.hear` and `usage_of` read it, in one step."""

    choices: tuple[_UsualEnd]
    usage: _Counts
    object: Literal["chat.completion", "text_completion"] = "chat.completion"
    error: None = None


_MOST_SKIPPED = 8 << 20
"""Bytes of an answer in one piece that are skipped at once, at 3 ms for each MB."""

_USUAL_WHOLE = msgspec.json.Decoder(_UsualWhole)


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
            try:
                chunk = read_json(data, Chunk) if has_many_values(data) else _CHUNK.decode(data)
            except (msgspec.DecodeError, UnicodeDecodeError):
                chunk = read_json(data, Chunk)
            if chunk.error or chunk.object == "error":
                raise error_in_stream(self.backend, chunk.error or read_json(data))
            if chunk.usage:
                self.told = told_usage(chunk.usage) or self.told
        except MISSHAPEN as error:
            raise nonsense(self.backend, data) from error
        chunk.pieces, chunk.text, chunk.ends = 0, "", []
        if chunk.choices is not None and len(chunk.choices) > self.choices:
            raise not_asked_for(self.backend, len(chunk.choices) - 1, self.choices)
        for choice in chunk.choices or ():
            number = choice.index or 0
            if not 0 <= number < self.choices:
                raise not_asked_for(self.backend, number, self.choices)
            if reason := choice.finish_reason:
                if reason in BROKEN:
                    raise BackendErred(f"{self.backend} broke the answer off ({reason})")
                chunk.ends.append((number, FINISHES.get(reason, reason)))
            # the text that it adds; None for anything beside text
            added: str | None = choice.text or ""
            if choice.text is msgspec.UNSET:
                piece = choice.delta or choice.message or {}
                content = piece.get("content") or ""
                added = content if isinstance(content, str) else None
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
        self._may_be_plain = ear.choices == 1 and ear.shown_model is None
        self._adds_text = self._was_tried = False
        """Did the newest chunk add text, so that the next one most often does? Was that one no plain chunk?"""

    def feed(self, data: bytes) -> Iterator[Delta]:
        """The Deltas in `data`. Raises as PassedBlocks does."""
        if not self._adds_text or self._blocks.begun or b"\r" in data:
            return super().feed(data)
        text, pieces, at = "", 0, 0
        while data.startswith(b"data: ", at):
            end = data.find(b"\n", at)
            if not data.startswith(b"\n\n", end) or not (added := self._text_in(data[at + 6 : end])):
                break
            text, pieces, at = text + added, pieces + 1, end + 2
        if not pieces:
            return super().feed(data)
        if at == len(data):
            return iter((Delta(text, raw=data, tokens=pieces),))
        return chain((Delta(text, raw=data[:at], tokens=pieces),), super().feed(data[at:]))

    def _text_in(self, content: bytes) -> str:
        """The text in a chunk, which is counted, if it adds text and nothing else; else nothing."""
        try:
            choice = _TEXT_CHUNK.decode(content).choices[0]
        except MISSHAPEN:
            self._adds_text, self._was_tried = False, True
            return ""
        text = choice.delta.content if choice.text is msgspec.UNSET else choice.text
        self._ear.pieces += bool(text)
        self._adds_text = bool(text)
        return text

    def end(self) -> Iterator[Delta]:
        """The held bytes. Raises BackendFailed if the end came too early."""
        yield from self._let_last_go()
        yield from super().end()

    def _take(self, block: bytes, content: bytes) -> Sequence[Delta]:
        if self._adds_text and (text := self._text_in(content)):
            self._hold(block, 1, text)
            return ()
        was_tried, self._was_tried, self._adds_text = self._was_tried, False, False
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
            if was_tried and chunk.text:
                # its server writes plain chunks in a way of its own
                self._may_be_plain = False
            self._adds_text = self._may_be_plain and bool(chunk.text)
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
    there = read_json(data_in(block) or b"{}", dict[str, msgspec.Raw])
    more = read_json(hidden, dict[str, msgspec.Raw])
    return {name: more[name] for name in _OF_THE_LAST if name in more and name not in there}


class PassedWhole(WholeBody):
    """Gives an answer in one piece back."""

    ear: Ear

    def read(self, whole: bytes) -> list[Delta]:
        """The answer, then its other ends; the last one with usage."""
        ear = self.ear
        if ear.shown_model is None and len(whole) <= _MOST_SKIPPED:
            try:
                usual = _USUAL_WHOLE.decode(whole)
            except MISSHAPEN:
                # an unusual one, or none
                pass
            else:
                counts, finish = usual.usage, usual.choices[0].finish_reason
                tokens, details = counts.completion_tokens, counts.prompt_tokens_details
                cached = 0 if details is None else details.cached_tokens or 0
                usage = Usage(counts.prompt_tokens, tokens, cached, counts.reasoning_tokens)
                return [Delta("", finish_reason=finish, usage=usage, body=whole, is_whole=True, tokens=tokens)]
        chunk = ear.hear(whole)
        if not chunk.choices:
            raise nonsense(ear.backend, whole)
        changes = ear.shown(chunk) if ear.shown_model is not None else {}
        body = with_members(whole, changes) if changes else whole
        usage = ear.told or ear.usage()
        tokens = 0 if usage.is_guess else usage.completion_tokens
        ends: list[tuple[int, str | None]] = chunk.ends or [(0, None)]
        choice, ended_by = ends[0]
        if len(ends) == 1:
            return [Delta("", choice, finish_reason=ended_by, usage=usage, body=body, is_whole=True, tokens=tokens)]
        deltas = [Delta("", choice, finish_reason=ended_by, body=body, is_whole=True, tokens=tokens)]
        for choice, ended_by in ends[1:]:
            deltas.append(Delta("", choice, finish_reason=ended_by))
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
