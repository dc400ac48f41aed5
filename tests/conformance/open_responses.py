"""The requests of Open Responses' compliance suite, by hand: it exists as sources only, and is written in TypeScript.

Source: openresponses/openresponses, `src/lib/compliance-tests.ts` (seven requests) and `schema/openapi.json`
(ResponseResource). The one with an image needs an engine that sees, and is left out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from urllib.request import Request, urlopen

_WEATHER = {
    "type": "function",
    "name": "run",
    "description": "Runs a command",
    "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
}


def _said(role: str, text: str) -> dict[str, str]:
    return {"type": "message", "role": role, "content": text}


_HELLO = [_said("user", "Say hello in exactly 3 words.")]
_TURNS = [_said("user", "My name is Alice."), _said("assistant", "Hello Alice!"), _said("user", "What is my name?")]
REQUESTS: Mapping[str, Mapping[str, Any]] = {
    "basic-response": {"input": _HELLO},
    "streaming-response": {"input": [_said("user", "Count from 1 to 5.")], "stream": True},
    "system-prompt": {"input": [_said("system", "You are a pirate."), _said("user", "Say hello.")]},
    "tool-calling": {"input": [_said("user", "What is the weather?")], "tools": [_WEATHER]},
    "tool-calling-streaming": {"input": [_said("user", "What is it?")], "tools": [_WEATHER], "stream": True},
    "multi-turn": {"input": _TURNS},
}
_REQUIRED = (
    *("id", "object", "created_at", "completed_at", "status", "incomplete_details", "model", "previous_response_id"),
    *("instructions", "output", "error", "tools", "tool_choice", "truncation", "parallel_tool_calls", "text", "top_p"),
    *("presence_penalty", "frequency_penalty", "top_logprobs", "temperature", "reasoning", "usage", "metadata"),
    *("max_output_tokens", "max_tool_calls", "store", "background", "service_tier", "safety_identifier"),
    "prompt_cache_key",
)
_CALL_EVENTS = ("response.function_call_arguments.delta", "response.function_call_arguments.done")


def problems_of(url: str, name: str, *, is_translated: bool) -> list[str]:
    """What is wrong with the answer to the request `name`. The fields are the engine's own if it is passed on."""
    body = {"model": "m", **REQUESTS[name]}
    raw = _posted(f"{url}/v1/responses", body)
    events = [json.loads(line[6:]) for line in raw.splitlines() if line.startswith("data: {")]
    response = events[-1]["response"] if body.get("stream") else json.loads(raw)
    found = [f"lacks {field}" for field in _REQUIRED if field not in response] if is_translated else []
    kinds = {item["type"] for item in response["output"]}
    if response["status"] != "completed":
        found.append(f"is {response['status']}")
    if ("function_call" if "tools" in body else "message") not in kinds:
        found.append(f"has only {sorted(kinds)}")
    if events and "tools" in body:
        seen = {event["type"] for event in events}
        items = [event["item"]["type"] for event in events if event["type"].startswith("response.output_item.")]
        found += [f"lacks {kind}" for kind in _CALL_EVENTS if kind not in seen]
        found += [] if items.count("function_call") == 2 else ["a call is not announced and done"]
    return found


def _posted(url: str, body: Mapping[str, Any]) -> str:
    asked = Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with urlopen(asked, timeout=60) as reply:
        return str(reply.read().decode())
