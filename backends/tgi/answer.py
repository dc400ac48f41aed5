"""Answers of Text Generation Inference: /generate_stream as Deltas, and errors. Pure but for memory.

Source: TGI 3.3, docs/openapi.json (StreamResponse, StreamDetails, ErrorResponse).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from backends.detokenize import StopCutter
from backends.http.errors import error_of, retry_after_s
from backends.http.event_answer import EventAnswer
from backends.http.lenient_json import logprob_of, read_json
from backends.http.nonsense import REQUIRED, reported_usage
from policies.errors import BackendErred, ContextExceeded, ExpectedError, InvalidRequest, Overloaded
from policies.nouns import Delta, TokenLogprob

_FINISHES = {"length": "length", "eos_token": "stop", "stop_sequence": "stop"}
_TOO_LONG = re.compile(r"`inputs` (?:tokens|must have less)|`max_new_tokens` must be <=")
_FIELD = re.compile(r"`(\w+)`")
_OPENAIS = {"inputs": "prompt", "max_new_tokens": "max_tokens", "best_of": "n", "top_n_tokens": "top_logprobs"}
_THE_CLIENTS = ("validation", "template_error", "missing_template_variable", "tool_error", "tokenizer error")
_SAYS = {
    "Input validation error": "validation",
    "Model is overloaded": "overloaded",
    "Template error": "template_error",
    "Missing template": "missing_template_variable",
    "Tool error": "tool_error",
}


class TGIAnswer(EventAnswer):
    """Fed with the body of a 200. The event with `details` is the last: there is no [DONE].

    TGI leaves the stop string in its text; here it is cut off. `wants_logprobs`: drawn tokens come with theirs.
    """

    last_word = "details"

    def __init__(self, backend: str, *, stops: tuple[str, ...] = (), wants_logprobs: bool = False) -> None:
        super().__init__(backend)
        self._wants_logprobs, self._cutter = wants_logprobs, StopCutter(stops)

    def _read(self, data: bytes) -> Iterator[Delta]:
        event = read_json(data)
        if event.get("error"):
            raise tgi_error(self._backend, event)
        delta = self._delta(event)
        if delta != Delta():
            yield delta
        if details := event.get("details"):
            yield from self._last(details)

    def _delta(self, event: Mapping[str, Any]) -> Delta:
        token = event["token"]
        if token["special"]:
            return Delta()
        logprobs: tuple[TokenLogprob, ...] = ()
        if self._wants_logprobs:
            logprobs = (_logprob(token, tuple(map(_logprob, event.get("top_tokens") or ()))),)
        return Delta(text=self._cutter.push(token["text"]), token_ids=(int(token["id"]),), logprobs=logprobs)

    def _last(self, details: Mapping[str, Any]) -> tuple[Delta, ...]:
        self.is_over = True
        finish = str(details["finish_reason"])
        usage = reported_usage(details.get("input_length"), details.get("generated_tokens", REQUIRED))
        held = self._cutter.flush()
        return (Delta(text=held, finish_reason=_FINISHES.get(finish, finish)), Delta(usage=usage))


def error_of_tgi(backend: str, status: int, body: bytes, headers: Mapping[str, str]) -> ExpectedError:
    """The error for an HTTP `status` with its `body` {error, error_type}; other bodies are read as OpenAI's are."""
    try:
        error = read_json(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        error = None
    if not isinstance(error, dict) or "error_type" not in error:
        return error_of(backend, status, body, headers)
    return tgi_error(backend, error, retry_after_s(headers))


def error_in_chat(backend: str, error: Any) -> ExpectedError:
    """The error in an event of a chat: {message, http_status_code}. The code is always 422, so only the words count."""
    message = str(error.get("message") if isinstance(error, Mapping) else error)
    kind = next((kind for start, kind in _SAYS.items() if message.startswith(start)), "generation")
    return tgi_error(backend, {"error": message, "error_type": kind})


def tgi_error(backend: str, error: Mapping[str, Any], wait_s: float | None = None) -> ExpectedError:
    """The error for {error, error_type}."""
    message, kind = str(error.get("error"))[:2000], error.get("error_type")
    if kind == "overloaded":
        return Overloaded(f"{backend} is busy: {message}", retry_after_s=wait_s)
    if kind not in _THE_CLIENTS:
        return BackendErred(f"{backend} failed: {message}", retry_after_s=wait_s)
    field = _FIELD.search(message)
    param = _OPENAIS.get(field[1], field[1]) if field else None
    return ContextExceeded(message, param=param) if _TOO_LONG.search(message) else InvalidRequest(message, param=param)


def _logprob(token: Mapping[str, Any], top: tuple[TokenLogprob, ...] = ()) -> TokenLogprob:
    return TokenLogprob(int(token["id"]), str(token["text"]), logprob_of(token["logprob"]), top)
