"""An engine with a script, for clients as they are installed: it calls the client's shell until it has seen so many
results, then it says a text. It speaks chats, and Responses and messages if it is told to.

Sources: OpenAI API reference, "Chat", "Responses"; Anthropic API reference, "Messages".
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
DONE = "the tools were run"
_SHELLS = ("exec_command", "shell", "shell_command", "local_shell", "Bash", "bash", "run_shell_command", "run")
_RESULTS = ("tool_result", "function_call_output", "custom_tool_call_output", "local_shell_call_output")


def arguments_of(name: str, command: str) -> dict[str, Any]:
    """The arguments with which the shell `name` runs `command`."""
    if name in ("shell", "local_shell"):
        return {"command": ["bash", "-lc", command]}
    if name == "exec_command":
        return {"cmd": command}
    beside = {} if name == "run" else {"description": "a step", "is_background": False}
    return {"command": command, **beside}


@dataclass
class ScriptedEngine:
    """Calls the shell `turns` times. `native`: it speaks Responses and messages too. A prompt of more than
    `context_bytes` is refused, and after `pieces` of a text it waits `delay_s` each.
    """

    turns: int = 10
    native: bool = False
    context_bytes: int = 10**9
    delay_s: float = 0.0
    text: str = DONE
    received: list[tuple[str, Any]] = field(default_factory=list)
    open: int = 0
    """Streams that go on."""
    most_results: int = 0
    """The most results of tools that a conversation had."""

    def app(self) -> web.Application:
        """Its endpoints."""
        app = web.Application(client_max_size=64 << 20)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/openapi.json", self.document)
        app.router.add_get("/health", self.health)
        for path in (CHAT, RESPONSES, MESSAGES) if self.native else (CHAT,):
            app.router.add_post(path, self.answer)
        return app

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "m", "object": "model", "max_model_len": 200_000}]})

    async def document(self, _: web.Request) -> web.Response:
        paths = (CHAT, RESPONSES, MESSAGES) if self.native else (CHAT,)
        return web.json_response({"paths": {path: {"post": {}} for path in paths}})

    async def health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """The next step of the script, in the dialect of the path."""
        raw = await request.read()
        body = json.loads(raw)
        self.received.append((request.path, body))
        if len(raw) > self.context_bytes:
            return self.too_long(request.path, len(raw) // 4)
        shell = _shell_in(body)
        seen = _results_in(body)
        self.most_results = max(self.most_results, seen)
        call = None
        if shell is not None and seen < self.turns:
            call = (f"call_{seen}_{len(self.received)}", shell, json.dumps(arguments_of(shell, f"echo step {seen}")))
        events = {CHAT: chat_events, RESPONSES: response_events, MESSAGES: message_events}[request.path]
        if not body.get("stream"):
            return web.json_response(_whole(request.path, call, self.text))
        reply = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await reply.prepare(request)
        self.open += 1
        try:
            for event in events(call, self.text):
                await reply.write(event)
                await asyncio.sleep(self.delay_s)
        finally:
            self.open -= 1
        return reply

    def too_long(self, path: str, tokens: int) -> web.Response:
        """A refusal in the words of vLLM, or of Anthropic."""
        most = self.context_bytes // 4
        if path == MESSAGES:
            error = {
                "type": "invalid_request_error",
                "message": f"prompt is too long: {tokens} tokens > {most} maximum",
            }
            return web.json_response({"type": "error", "error": error}, status=400)
        what = f"This model's maximum context length is {most} tokens. However, your request has {tokens} input tokens."
        error = {"message": what, "type": "BadRequestError", "code": 400, "param": "input_tokens"}
        return web.json_response({"error": error}, status=400)


def _shell_in(body: Mapping[str, Any]) -> str | None:
    """The name of the tool of `body` that runs commands."""
    names = []
    for tool in body.get("tools") or ():
        names += [tool.get("name") or (tool.get("function") or {}).get("name") or tool.get("type")]
        names += [inner.get("name") for inner in tool.get("tools") or ()]
    return next((name for name in _SHELLS if name in names), None)


def _results_in(body: Mapping[str, Any]) -> int:
    """How many results of tools the conversation has."""
    items = body.get("input") if isinstance(body.get("input"), list) else body.get("messages") or []
    count = 0
    for item in items:
        blocks = item.get("content") if isinstance(item.get("content"), list) else []
        count += item.get("role") == "tool" or item.get("type") in _RESULTS
        count += sum(block.get("type") in _RESULTS for block in blocks if isinstance(block, dict))
    return count


def _sse(payload: Mapping[str, Any], name: str | None = None) -> bytes:
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(payload)}\n\n".encode()


def chat_events(call: tuple[str, str, str] | None, text: str) -> Iterator[bytes]:
    """A chat as chunks."""

    def chunk(delta: Mapping[str, Any], finish: str | None = None, **more: Any) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        return _sse(
            {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice], **more}
        )

    yield chunk({"role": "assistant", "content": ""})
    if call is not None:
        id_, name, arguments = call
        yield chunk(
            {"tool_calls": [{"index": 0, "id": id_, "type": "function", "function": {"name": name, "arguments": ""}}]}
        )
        for at in range(0, len(arguments), 7):
            yield chunk({"tool_calls": [{"index": 0, "function": {"arguments": arguments[at : at + 7]}}]})
    else:
        for word in text.split(" "):
            yield chunk({"content": word + " "})
    yield chunk({}, "stop" if call is None else "tool_calls", usage=_USAGE)
    yield b"data: [DONE]\n\n"


_USAGE = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}


def response_events(call: tuple[str, str, str] | None, text: str) -> Iterator[bytes]:
    """A response as the events of its stream."""
    response = _whole(RESPONSES, call, text)
    number = 0

    def event(kind: str, **fields: Any) -> bytes:
        nonlocal number
        number += 1
        return _sse({"type": kind, "sequence_number": number, **fields}, kind)

    yield event("response.created", response={**response, "status": "in_progress", "output": []})
    (item,) = response["output"]
    where = {"output_index": 0, "item_id": item["id"]}
    if call is not None:
        yield event("response.output_item.added", output_index=0, item={**item, "arguments": ""})
        yield event("response.function_call_arguments.delta", **where, delta=call[2])
        yield event("response.function_call_arguments.done", **where, arguments=call[2], name=call[1])
    else:
        yield event("response.output_item.added", output_index=0, item={**item, "content": []})
        part = {"type": "output_text", "text": "", "annotations": []}
        yield event("response.content_part.added", **where, content_index=0, part=part)
        for word in text.split(" "):
            yield event("response.output_text.delta", **where, content_index=0, delta=word + " ", logprobs=[])
        yield event("response.output_text.done", **where, content_index=0, text=text, logprobs=[])
        yield event("response.content_part.done", **where, content_index=0, part={**part, "text": text})
    yield event("response.output_item.done", output_index=0, item=item)
    yield event("response.completed", response=response)


def message_events(call: tuple[str, str, str] | None, text: str) -> Iterator[bytes]:
    """A message as the events of its stream."""
    message = _whole(MESSAGES, call, text)
    (block,) = message["content"]

    def event(kind: str, **fields: Any) -> bytes:
        return _sse({"type": kind, **fields}, kind)

    yield event("message_start", message={**message, "content": [], "stop_reason": None})
    empty = {**block, "input": {}} if call is not None else {**block, "text": ""}
    yield event("content_block_start", index=0, content_block=empty)
    if call is not None:
        yield event("content_block_delta", index=0, delta={"type": "input_json_delta", "partial_json": call[2]})
    else:
        for word in text.split(" "):
            yield event("content_block_delta", index=0, delta={"type": "text_delta", "text": word + " "})
    yield event("content_block_stop", index=0)
    ending = {"stop_reason": message["stop_reason"], "stop_sequence": None}
    yield event("message_delta", delta=ending, usage={"output_tokens": 10})
    yield event("message_stop")


def _whole(path: str, call: tuple[str, str, str] | None, text: str) -> dict[str, Any]:
    """A whole answer in the dialect of `path`."""
    if path == CHAT:
        message: dict[str, Any] = {"role": "assistant", "content": text if call is None else None}
        if call is not None:
            function = {"name": call[1], "arguments": call[2]}
            message["tool_calls"] = [{"id": call[0], "type": "function", "function": function}]
        choice = {"index": 0, "message": message, "finish_reason": "stop" if call is None else "tool_calls"}
        return {
            "id": "c",
            "object": "chat.completion",
            "created": 1,
            "model": "m",
            "choices": [choice],
            "usage": _USAGE,
        }
    usage = {"input_tokens": 100, "output_tokens": 10}
    if path == MESSAGES:
        block = {"type": "text", "text": text}
        if call is not None:
            block = {"type": "tool_use", "id": call[0], "name": call[1], "input": json.loads(call[2])}
        head = {"id": "msg_1", "type": "message", "role": "assistant", "model": "m", "content": [block]}
        return {
            **head,
            "stop_reason": "end_turn" if call is None else "tool_use",
            "stop_sequence": None,
            "usage": usage,
        }
    content = [{"type": "output_text", "text": text, "annotations": []}]
    item = {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": content}
    if call is not None:
        named = {"call_id": call[0], "name": call[1], "arguments": call[2]}
        item = {"type": "function_call", "id": "fc_1", "status": "completed", **named}
    details = {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
    head = {
        "id": "resp_1",
        "object": "response",
        "created_at": 1,
        "status": "completed",
        "model": "m",
        "output": [item],
    }
    return {**head, "tools": [], "usage": {**usage, **details, "total_tokens": 110}}


def main() -> None:
    """Run one until it is interrupted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--native", action="store_true")
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--context-bytes", type=int, default=10**9)
    parser.add_argument("--delay", type=float, default=0.0)
    given = parser.parse_args()
    engine = ScriptedEngine(given.turns, given.native, given.context_bytes, given.delay)
    web.run_app(engine.app(), host="127.0.0.1", port=given.port, print=None)


if __name__ == "__main__":
    main()
