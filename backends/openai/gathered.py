"""Pieces of a streamed message of OpenAI's dialect, added up. Pure.

Source: OpenAI API reference, "The chat completion object", "The chat completion chunk object".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_NOT_GROWING = ("role", "id", "type", "thinking_blocks")
"""Members that are sent whole each time, or once."""


def merge_message(message: dict[str, Any], piece: Mapping[str, Any]) -> None:
    """Add `piece` of a streamed message to `message`: texts and lists grow, tool calls are matched by their index."""
    for name, value in piece.items():
        if name == "tool_calls" and isinstance(value, list):
            # SGLang sends null in every piece without a value
            calls = message["tool_calls"] = message.get("tool_calls") or []
            for call in value:
                _merge_call(calls, call)
        elif isinstance(value, str) and isinstance(message.get(name), str) and name not in _NOT_GROWING:
            message[name] += value
        elif isinstance(value, list) and isinstance(message.get(name), list) and name not in _NOT_GROWING:
            message[name] = [*message[name], *value]
        elif isinstance(value, Mapping) and isinstance(message.get(name), dict):
            merge_message(message[name], value)
        elif value is not None or name not in message:
            message[name] = dict(value) if isinstance(value, Mapping) else value


def _merge_call(calls: list[dict[str, Any]], call: Mapping[str, Any]) -> None:
    index = call.get("index", len(calls))
    known = next((candidate for candidate in calls if candidate.get("index") == index), None)
    if known is None:
        known = {}
        calls.append(known)
    merge_message(known, {"index": index, **call})
