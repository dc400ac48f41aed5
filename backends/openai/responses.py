"""Answers of OpenAI's Responses, passed to a client of that API unchanged: only accounting data is read.

Pure but for their own memory. Source: OpenAI API reference, "Responses", "Streaming events".
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from backends.http.errors import error_in_stream
from backends.http.exchange import WholeBody
from backends.http.json_members import with_members
from backends.http.lenient_json import read_json
from backends.http.nonsense import MISSHAPEN, REQUIRED, counts_in, nonsense, reported_usage, tokens_of_text
from backends.http.passed import PassedBlocks
from backends.http.sse import block_of
from policies.nouns import Delta, Usage

RESPONSES_PATH = "/v1/responses"

_FINISHES = {"completed": "stop", "incomplete": "length"}
_ENDS = frozenset({"response.completed", "response.incomplete", "response.failed"})


class PassedResponse(PassedBlocks):
    """Fed with a stream, gives its own bytes back; response.completed or response.incomplete comes last, with usage.

    `shown_model` is the name under which the client knows the model, where it is another than the server's.
    """

    last_word = "response.completed"

    def __init__(self, backend: str, *, shown_model: str | None = None) -> None:
        super().__init__(backend)
        self._shown_model = shown_model

    def _take(self, block: bytes, data: bytes) -> Sequence[Delta]:
        try:
            event = read_json(data)
            kind, response = event["type"], event.get("response")
            if kind == "error":
                raise error_in_stream(self._backend, event)
            if kind == "response.failed":
                raise error_in_stream(self._backend, response.get("error") or {})
            ending = (_finish(response), _usage(response.get("usage"))) if kind in _ENDS else None
            if response is not None and self._shown_model is not None:
                block = _renamed(data, kind, self._shown_model)
        except MISSHAPEN as error:
            raise nonsense(self._backend, data) from error
        if ending is not None:
            self.is_over = True
            finish, usage = ending
            held = [self._let_go()] if self._held else []
            return [*held, Delta(finish_reason=finish, usage=usage, raw=block)]
        self._hold(block, pieces=kind.endswith(".delta"))
        return ()


class PassedWholeResponse(WholeBody):
    """Gives a response in one piece back."""

    backend: str
    shown_model: str | None = None

    def read(self, whole: bytes) -> list[Delta]:
        """The response, with its usage."""
        try:
            response = read_json(whole)
            if response.get("status") == "failed" or response.get("error"):
                raise error_in_stream(self.backend, response.get("error") or {})
            finish, usage = _finish(response), _usage(response.get("usage"))
            tokens = usage.completion_tokens or tokens_of_text(_texts(response["output"]))
        except MISSHAPEN as error:
            raise nonsense(self.backend, whole) from error
        body = whole if self.shown_model is None else with_members(whole, {"model": self.shown_model})
        return [Delta(body=body, finish_reason=finish, usage=usage, is_whole=True, tokens=tokens)]


def _finish(response: Mapping[str, Any]) -> str:
    """OpenAI's word of chats for how `response` ended."""
    calls = any(item["type"] == "function_call" for item in response["output"])
    return "tool_calls" if calls else _FINISHES[response["status"]]


def _usage(usage: Any) -> Usage:
    """The usage object of Responses as ours."""
    counts = counts_in(usage)
    cached = counts_in(counts.get("input_tokens_details")).get("cached_tokens")
    thought = counts_in(counts.get("output_tokens_details")).get("reasoning_tokens")
    prompt, completion = (counts.get(name, REQUIRED) for name in ("input_tokens", "output_tokens"))
    return reported_usage(prompt, completion, cached, thought)


def _texts(output: Iterable[Mapping[str, Any]]) -> Iterator[Any]:
    for item in output:
        yield item.get("arguments")
        for part in item.get("content") or item.get("summary") or ():
            yield part.get("text")


def _renamed(data: bytes, kind: str, shown_model: str) -> bytes:
    """The event `data` of `kind`, with the client's name of the model in its response."""
    response = bytes(read_json(data, dict[str, msgspec.Raw])["response"])
    return block_of(with_members(data, {"response": msgspec.Raw(with_members(response, {"model": shown_model}))}), kind)
