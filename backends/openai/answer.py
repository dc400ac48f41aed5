"""Answers of OpenAI's dialect, streamed and whole, read into Deltas. Pure but for their own memory.

Source: OpenAI API reference, "The chat completion chunk object", "The chat completion object", "The completion object".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from msgspec.structs import replace

from backends.http.errors import error_in_stream
from backends.http.event_answer import EventAnswer
from backends.http.exchange import WholeBody
from backends.http.lenient_json import logprob_of, read_json
from backends.http.nonsense import MISSHAPEN, nonsense, not_asked_for, reported_usage
from backends.openai.calls import CallPieces
from backends.openai.continued import trailing_space, whole_usage
from backends.openai.parts import content_of_parts
from policies.errors import BackendErred, ExpectedError
from policies.nouns import Beginning, Delta, Request, TokenLogprob, Usage

DONE = b"[DONE]"
BROKEN = ("abort", "error")
"""Finish reasons of broken answers: vLLM, SGLang and LMDeploy send them if another caller stopped the request."""

_ID_MARK = "token_id:"
FINISHES = {"eos_token": "stop", "stop_sequence": "stop"}
"""Finish reasons of TGI before 2.0 that OpenAI calls `stop`."""


class OpenAIAnswer(EventAnswer):
    """Fed with the body of a 200, streamed (server-sent events) or whole (one JSON object of at most `limit_bytes`).

    Usage comes last and once, as a Delta of its own. Where the server tells none, tokens are estimated: the prompt's as
    the request has them, one for each Delta with text or a message. `error_of` says what an error in the body means.
    `most_choices` is for answers to several prompts at once; else there are as many as the request asks for.
    Of an answer with a `beginning` from elsewhere, usage covers that too. No call gets an id of `taken_ids`.
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
        taken_ids: frozenset[str] = frozenset(),
    ) -> None:
        super().__init__(backend)
        self._error_of, self._taken_ids = error_of, taken_ids
        self._calls: dict[int, CallPieces] = {}
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
            raise BackendErred(f"{self._backend} answered more than {self._limit_bytes} bytes")

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
        chunk = chunk_in(self._backend, data, self._error_of)
        choices = chunk.get("choices") or ()
        if not (choices or self._is_streamed):
            raise nonsense(self._backend, data)
        if len(choices) > len(self._choices):
            raise not_asked_for(self._backend, len(choices) - 1, len(self._choices))
        for delta in deltas_of(chunk):
            if delta.usage is not None:
                self._usage = delta.usage
                continue
            if delta.finish_reason in BROKEN:
                raise BackendErred(f"{self._backend} broke the answer off ({delta.finish_reason})")
            if delta.choice not in self._choices:
                raise not_asked_for(self._backend, delta.choice, len(self._choices))
            self._pieces += bool(delta.text or delta.message)
            whole = self._with_calls(delta) if delta.message and "tool_calls" in delta.message else delta
            yield self._unrepeated(whole) if self._repeated else whole

    def _with_calls(self, delta: Delta) -> Delta:
        """`delta` with calls as the dialect has them."""
        assert delta.message is not None
        calls = self._calls.setdefault(delta.choice, CallPieces(self._taken_ids))
        return replace(delta, message={**delta.message, "tool_calls": calls.read(delta.message["tool_calls"])})

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


class ReadWhole(WholeBody):
    """The Deltas of an answer in one piece, which `answer` reads."""

    answer: OpenAIAnswer

    def read(self, whole: bytes) -> list[Delta]:
        """All of them. Raises as `answer` does."""
        return [*self.answer.feed(whole), *self.answer.end()]


def chunk_in(backend: str, data: bytes, error_of: Callable[[str, Any], ExpectedError]) -> dict[str, Any]:
    """The chunk, or whole answer, in `data`. Raises `error_of` of an error, and MISSHAPEN at nonsense."""
    chunk: dict[str, Any] = read_json(data)
    error = chunk.get("error") or (chunk if chunk.get("object") == "error" else None)
    if error:
        raise error_of(backend, error)
    return chunk


def deltas_of(chunk: Mapping[str, Any]) -> Iterator[Delta]:
    """The Deltas of one chunk, or one whole answer, of chat or text completions; usage comes as a Delta of its own.

    Raises KeyError, TypeError, ValueError or AttributeError if it has another shape.
    """
    for choice in chunk.get("choices") or ():
        delta = _chat(choice) if "text" not in choice else _text(choice)
        if delta != Delta(choice=delta.choice):
            yield delta
    if chunk.get("usage") and (told := told_usage(chunk["usage"])) is not None:
        yield Delta(usage=told)


def told_usage(usage: Any) -> Usage | None:
    """OpenAI's `usage` object as ours; None where it has another shape, or says that nothing was used: the answer is
    whole without it, and counted.
    """
    try:
        told = usage_of(usage)
    except MISSHAPEN:
        return None
    is_told = not told.is_guess and (told.prompt_tokens or told.completion_tokens)
    return told if is_told else None


def usage_of(usage: Mapping[str, Any]) -> Usage:
    """OpenAI's usage object as ours. Raises as `deltas_of`, also for values that are no counts."""
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    if cached is None:
        # DeepSeek's and Moonshot's servers say it beside
        cached = usage.get("prompt_cache_hit_tokens")
        cached = usage.get("cached_tokens") if cached is None else cached
    # SGLang puts it beside the choices
    thought = (usage.get("completion_tokens_details") or {}).get("reasoning_tokens", usage.get("reasoning_tokens"))
    # OpenRouter's and LiteLLM's gateways pass Anthropic's count on
    details = usage.get("prompt_tokens_details") or {}
    written = details.get("cache_write_tokens", details.get("cache_creation_tokens"))
    return reported_usage(usage.get("prompt_tokens"), usage.get("completion_tokens"), cached, thought, written)


def _chat(choice: Mapping[str, Any]) -> Delta:
    delta = choice.get("delta") or choice.get("message") or {}
    beside = {name: value for name, value in delta.items() if name not in ("role", "content") and value is not None}
    logprobs = choice.get("logprobs") or {}
    content = delta.get("content") or ""
    if not isinstance(content, str):
        content, thoughts = content_of_parts(content)
        beside = {**thoughts, **beside}
    return replace(
        _common(choice),
        text=content,
        message=beside or None,
        logprobs=_readable(_chat_logprobs(logprobs)),
    )


def _text(choice: Mapping[str, Any]) -> Delta:
    return replace(_common(choice), text=choice["text"] or "", logprobs=_readable(_text_logprobs(choice)))


def _common(choice: Mapping[str, Any]) -> Delta:
    finish, stop = choice.get("finish_reason") or None, choice.get("stop_reason", choice.get("matched_stop"))
    return Delta(
        choice=int(choice.get("index") or 0),
        # vLLM's `return_token_ids`
        token_ids=_ids(choice.get("token_ids")),
        finish_reason=FINISHES.get(finish, finish) if finish else None,
        # vLLM's and SGLang's, which may be a token id as well
        stop=stop if isinstance(stop, str) else None,
    )


def _ids(value: Any) -> tuple[int, ...]:
    """The token ids in `value`; none where it is anything else."""
    if not isinstance(value, list) or not all(type(item) is int and 0 <= item < 2**32 for item in value):
        return ()
    return tuple(value)


def _readable(logprobs: Iterator[TokenLogprob]) -> tuple[TokenLogprob, ...]:
    """All `logprobs`; none where they have another shape: the answer is whole without them."""
    try:
        return tuple(logprobs)
    except MISSHAPEN:
        return ()


def _chat_logprobs(logprobs: Any) -> Iterator[TokenLogprob]:
    yield from map(_chat_logprob, logprobs.get("content") or ())


def _chat_logprob(entry: Mapping[str, Any]) -> TokenLogprob:
    top = tuple(map(_chat_logprob, entry.get("top_logprobs") or ()))
    # llama.cpp and TabbyAPI report the id
    number = entry.get("id", entry.get("token_id"))
    token_id = number if isinstance(number, int) else _token_id(entry["token"])
    return TokenLogprob(token_id, entry["token"], logprob_of(entry["logprob"]), top, _octets(entry.get("bytes")))


def _octets(given: Any) -> bytes | None:
    """The bytes of a token, as OpenAI lists them; None where they are not there."""
    try:
        return bytes(given) if isinstance(given, list) else None
    except (ValueError, TypeError):
        return None


def _text_logprobs(choice: Mapping[str, Any]) -> Iterator[TokenLogprob]:
    columns = choice.get("logprobs") or {}
    # llama.cpp writes those of text as those of chats
    yield from map(_chat_logprob, columns.get("content") or ())
    tokens = columns.get("tokens") or ()
    tops = columns.get("top_logprobs") or [None] * len(tokens)
    for token, logprob, top in zip(tokens, columns.get("token_logprobs") or (), tops, strict=True):
        others = tuple(TokenLogprob(_token_id(other), other, logprob_of(value)) for other, value in (top or {}).items())
        # the first token of an echoed prompt has no probability
        yield TokenLogprob(_token_id(token), token, 0.0 if logprob is None else logprob_of(logprob), others)


def _token_id(token: str) -> int:
    """The id if a backend reports it (vLLM's `return_tokens_as_token_ids`), else 0: the dialect has no ids."""
    return int(token.removeprefix(_ID_MARK)) if token.startswith(_ID_MARK) else 0
