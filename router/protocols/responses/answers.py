"""Renders OpenAI's Responses API: Deltas become events of a stream or one response object. Pure; returns bytes.

Source: OpenAI API reference, "Responses", "Streaming events".
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from backends.http.lenient_json import read_json
from backends.http.sse import SseBlocks, data_in
from policies.errors import ExpectedError, InvalidRequest
from policies.nouns import Delta, Usage
from router.ask import Ask
from router.protocols.calls_in_order import CallsInOrder
from router.protocols.dialect import Answer, Failure, Head, comment, refusal_in, thought_in
from router.protocols.openai.answers import chat_logprob
from router.protocols.openai.dialect import openai_failure
from router.protocols.responses.request import responses_ask
from router.protocols.responses.tools import action_of, input_of, item_of, origins_of
from router.protocols.status import openai_error
from router.protocols.untranslated import RESPONSES, untranslated

_encode = msgspec.json.encode

_ECHOED: Mapping[str, Any] = {
    "background": False,
    "frequency_penalty": 0.0,
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "presence_penalty": 0.0,
    "prompt_cache_key": None,
    "reasoning": None,
    "safety_identifier": None,
    "service_tier": "default",
    "temperature": 1.0,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "top_p": 1.0,
    "user": None,
}
"""Fields that a response repeats from its request, with their defaults."""

_MESSAGE: Mapping[str, Any] = {"type": "message", "role": "assistant"}
_IDS = {
    "reasoning": "rs",
    "message": "msg",
    "function_call": "fc",
    "custom_tool_call": "ctc",
    "local_shell_call": "lsh",
}
"""Prefixes of the ids of items, by their type."""

_PARAMS: Mapping[str, str] = {
    "messages": "input",
    "prompt": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "logprobs": "top_logprobs",
}
"""Field of chats -> the field of this API that became it."""

_BEGINNINGS = frozenset({"response.created", "response.queued", "response.in_progress"})
_ENDS = frozenset({"response.completed", "response.incomplete"})

_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}


class ResponsesDialect:
    """`/v1/responses`."""

    prefix = "resp_"
    passes_on = True

    def parse(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> Ask:
        """The Ask of `body`. Raises InvalidRequest."""
        try:
            return responses_ask(body, headers)
        except InvalidRequest as refusal:
            return untranslated(body, headers, RESPONSES, refusal)

    def stream(self, head: Head, ask: Ask) -> ResponseStream:
        """Events from response.created to response.completed."""
        return ResponseStream(head, _translated(ask))

    def whole(self, head: Head, ask: Ask, answers: Sequence[Answer], usage: Usage) -> bytes:
        """One response, as in the last event of its stream."""
        (answer,) = answers
        stream = ResponseStream(head, _translated(ask))
        thought = thought_in(answer.message)
        if thought:
            stream.render(0, Delta(message={"reasoning_content": thought}))
        beside = {"refusal": refusal_in(answer.message), "tool_calls": answer.message.get("tool_calls") or ()}
        logprobs = tuple(answer.logprobs)
        stream.render(0, Delta(answer.text, logprobs=logprobs, message=beside, finish_reason=answer.finish_reason))
        stream.end(usage)
        return _encode(stream.response)

    def failure(self, error: ExpectedError) -> Failure:
        """{"error": ...}."""
        reply = openai_failure(error)
        return reply if error.param not in _PARAMS else reply._replace(body=_encode({"error": _error(error)}))


def _translated(ask: Ask) -> Mapping[str, Any]:
    """The body of `ask`, as far as an answer that is rendered here repeats it: one that was not translated never is."""
    native = ask.natives[0]
    return native.body if native.untranslated is None else {}


class ResponseStream:
    """Renders one streamed response: items of reasoning, text and function calls, one open at a time.

    `response` is the response object so far; the last event carries it.
    """

    def __init__(self, head: Head, body: Mapping[str, Any], unix_time: Callable[[], float] = time.time) -> None:
        echoed = {name: usual if body.get(name) is None else body[name] for name, usual in _ECHOED.items()}
        self.response: dict[str, Any] = {
            "id": head.id,
            "object": "response",
            "created_at": head.created,
            "completed_at": None,
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "model": head.model,
            "output": [],
            "previous_response_id": None,
            "store": False,
            "truncation": "disabled",
            "usage": None,
            **echoed,
            "tools": [_with_strictness(tool) for tool in echoed["tools"]],
        }
        self._events, self.has_begun, self._turns = 0, False, CallsInOrder()
        self._blocks, self._ending = SseBlocks(), b""
        self._open: str | int | None = None
        """The open item: "reasoning", "message", "refusal", or the number of a tool call; None if none is open."""
        self._finish: str | None = None
        self._arguments, self._unix_time = list[str](), unix_time
        self._origins = origins_of(body.get("tools") or ())

    def __repr__(self) -> str:
        return f"<ResponseStream {self.response['id']}: {len(self.response['output'])} items, {self._open!r} open>"

    def begin(self, prompt_tokens: int) -> None:
        """Do nothing: usage comes at the end."""

    def resume(self, raw: bytes, characters: int) -> None:
        """Do nothing: no answer of this dialect is continued behind a backend's own events."""

    def progress(self, text: str) -> bytes:
        """An event of no consequence, as OpenAI sends in long silences, and a comment for people: for Codex only events
        show that a stream lives."""
        # OpenAI's own client takes no other event before the first two
        return comment(text) + b"".join(self._begin()) + self._event("keepalive")

    def render(self, index: int, delta: Delta) -> bytes:  # noqa: ARG002 - a response has one choice
        """The events for one piece."""
        self._finish = delta.finish_reason or self._finish
        return b"".join(event for piece in self._turns.feed(delta) for event in self._events_of(piece))

    def merge(self, first: int, raw: bytes) -> bytes:  # noqa: ARG002 - a call has one prompt
        """A backend's events `raw` behind the first ones of ours: those are not told again, and all are of one response
        and numbered in a row. What ends it waits for the end."""
        return b"".join(map(self._merged, self._blocks.feed(raw)))

    def _merged(self, block: bytes) -> bytes:
        data = data_in(block)
        if data is None:
            return block
        event = read_json(data)
        kind = event["type"]
        if kind in _BEGINNINGS:
            return b""
        fields = {name: value for name, value in event.items() if name not in ("type", "sequence_number")}
        if isinstance(fields.get("response"), dict):
            fields["response"]["id"] = self.response["id"]
        told = self._event(kind, **fields)
        if kind not in _ENDS:
            return told
        self._ending = told
        return b""

    def end(self, usage: Usage) -> bytes:
        """The events that close the last item and the response."""
        if self._ending:
            return self._ending
        reason = _INCOMPLETE.get(self._finish or "")
        status = "completed" if reason is None else "incomplete"
        waited = [event for piece in self._turns.end() for event in self._events_of(piece)]
        events = [*waited, *self._begin(), *self._close(status)]
        details = None if reason is None else {"reason": reason}
        if status == "completed":
            self.response["completed_at"] = max(int(self._unix_time()), self.response["created_at"])
        self.response |= {"status": status, "incomplete_details": details, "usage": _usage(usage)}
        return b"".join(events) + self._event(f"response.{status}", response=self.response)

    def fail(self, error: ExpectedError) -> bytes:
        """An error event, and the response so far."""
        failure = _error(error)
        events = [
            *self._begin(),
            self._event("error", **{name: failure[name] for name in ("code", "message", "param")}),
        ]
        self.response |= {"status": "failed", "error": {name: failure[name] for name in ("code", "message")}}
        return b"".join(events) + self._event("response.failed", response=self.response)

    def _begin(self) -> Iterator[bytes]:
        if not self.has_begun:
            self.has_begun = True
            yield self._event("response.created", response=self.response)
            yield self._event("response.in_progress", response=self.response)

    def _events_of(self, delta: Delta) -> Iterator[bytes]:
        message = delta.message or {}
        if delta.text or delta.logprobs or message.get("tool_calls") or thought_in(message) or refusal_in(message):
            yield from self._begin()
            yield from self._piece(delta, message)

    def _piece(self, delta: Delta, message: Mapping[str, Any]) -> Iterator[bytes]:
        if thought := thought_in(message):
            reasoning = {"type": "reasoning_text", "text": ""}
            yield from self._switch("reasoning", {"type": "reasoning", "summary": [], "content": []}, reasoning)
            self._part["text"] += thought
            yield self._in_part("response.reasoning_text.delta", delta=thought)
        if delta.text or delta.logprobs:
            text = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            yield from self._switch("message", {**_MESSAGE, "content": []}, text)
            logprobs = [chat_logprob(token) for token in delta.logprobs]
            self._part["text"] += delta.text
            self._part["logprobs"] += logprobs
            yield self._in_part("response.output_text.delta", delta=delta.text, logprobs=logprobs)
        if refusal := refusal_in(message):
            yield from self._switch("refusal", {**_MESSAGE, "content": []}, {"type": "refusal", "refusal": ""})
            self._part["refusal"] += refusal
            yield self._in_part("response.refusal.delta", delta=refusal)
        for call in message.get("tool_calls") or ():
            yield from self._call(call)

    def _call(self, call: Mapping[str, Any]) -> Iterator[bytes]:
        function = call.get("function") or {}
        number = int(call.get("index") or 0)
        if self._open != number:
            yield from self._switch(number, item_of(call.get("id"), function.get("name"), self._origins), None)
            self._arguments = []
        if arguments := function.get("arguments"):
            self._arguments.append(arguments)
            if self._item["type"] == "function_call":
                yield self._in_item("response.function_call_arguments.delta", delta=arguments)

    def _switch(self, kind: str | int, item: dict[str, Any], part: dict[str, Any] | None) -> Iterator[bytes]:
        """Close the open item, unless it is of `kind`, and begin `item` with its one content `part`."""
        if self._open == kind:
            return
        yield from self._close()
        self._open = kind
        number = len(self.response["output"])
        name = _IDS[item["type"]]
        item = {"id": f"{name}_{self.response['id'].removeprefix('resp_')}_{number}", **item, "status": "in_progress"}
        self.response["output"].append(item)
        yield self._event("response.output_item.added", output_index=number, item=item)
        if part is not None:
            item["content"].append(part)
            yield self._in_part("response.content_part.added", part=part)

    def _close(self, status: str = "completed") -> Iterator[bytes]:
        if self._open is None:
            return
        item, self._open = self._item, None
        arguments = "".join(self._arguments)
        if item["type"] == "function_call":
            item["arguments"] = arguments or "{}"
            done = {"name": item["name"], "arguments": item["arguments"]}
            yield self._in_item("response.function_call_arguments.done", **done)
        elif item["type"] == "custom_tool_call":
            # its text is whole only now: it came as JSON
            item["input"] = input_of(arguments)
            yield self._in_item("response.custom_tool_call_input.delta", delta=item["input"])
            yield self._in_item("response.custom_tool_call_input.done", input=item["input"])
        elif item["type"] == "local_shell_call":
            item["action"] = action_of(arguments)
        else:
            part = self._part
            fields = {name: value for name, value in part.items() if name not in ("type", "annotations")}
            yield self._in_part(f"response.{part['type']}.done", **fields)
            yield self._in_part("response.content_part.done", part=part)
        item["status"] = status
        yield self._event("response.output_item.done", output_index=self._number, item=item)

    @property
    def _number(self) -> int:
        return len(self.response["output"]) - 1

    @property
    def _item(self) -> dict[str, Any]:
        item: dict[str, Any] = self.response["output"][-1]
        return item

    @property
    def _part(self) -> dict[str, Any]:
        part: dict[str, Any] = self._item["content"][0]
        return part

    def _in_part(self, kind: str, **fields: Any) -> bytes:
        return self._in_item(kind, content_index=0, **fields)

    def _in_item(self, kind: str, **fields: Any) -> bytes:
        return self._event(kind, item_id=self._item["id"], output_index=self._number, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = _encode({"type": kind, "sequence_number": self._events, **fields})
        self._events += 1
        return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"


def _with_strictness(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """`tool` as a response repeats it: with all members of a function."""
    if tool.get("type") != "function":
        return tool
    return {"description": None, "parameters": None, "strict": None, **tool}


def _error(error: ExpectedError) -> dict[str, Any]:
    """OpenAI's error, with the field by its name in this API."""
    failure: dict[str, Any] = openai_error(error)["error"]
    return failure | {"param": _PARAMS.get(error.param or "", error.param)}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.cached_tokens,
            "cache_write_tokens": 0,
            **({"blended_tokens": usage.blended_tokens} if usage.blended_tokens else {}),
        },
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens or 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
