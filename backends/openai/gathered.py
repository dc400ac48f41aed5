"""The chunks of one streamed answer of OpenAI's dialect, added up to what the server would have answered whole. Pure.

Source: OpenAI API reference, "The chat completion object", "The chat completion chunk object".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

_NOT_GROWING = ("role", "id", "type", "thinking_blocks")
"""Members that are said whole each time, or once."""


class Gathered:
    """Takes the chunks of one answer; fields that nobody here knows are kept, the last value of each."""

    def __init__(self) -> None:
        self._whole: dict[str, Any] = {}
        self.choices: dict[int, dict[str, Any]] = {}

    def __repr__(self) -> str:
        return f"<Gathered {len(self.choices)} choices>"

    def add(self, chunk: Mapping[str, Any]) -> None:
        """Take one more chunk."""
        for name, value in chunk.items():
            if name != "choices" and (value is not None or name not in self._whole):
                self._whole[name] = value
        for choice in chunk.get("choices") or ():
            self._add_to(self.choices.setdefault(int(choice.get("index") or 0), {}), choice)

    def finishes(self) -> list[tuple[int, str]]:
        """(choice, reason) of those that have ended."""
        ends = ((at, choice.get("finish_reason")) for at, choice in sorted(self.choices.items()))
        return [(at, reason) for at, reason in ends if reason]

    def body(self) -> bytes:
        """The whole answer as JSON."""
        kind = str(self._whole.get("object", "")).removesuffix(".chunk")
        choices = [self.choices[at] for at in sorted(self.choices)]
        for choice in choices:
            for call in (choice.get("message") or {}).get("tool_calls") or ():
                call.pop("index", None)
        usage = {"usage": self._whole["usage"]} if "usage" in self._whole else {}
        before = {name: value for name, value in self._whole.items() if name != "usage"}
        return msgspec.json.encode({**before, "object": kind, "choices": choices, **usage})

    def _add_to(self, choice: dict[str, Any], piece: Mapping[str, Any]) -> None:
        for name, value in piece.items():
            if name == "delta":
                message = choice.setdefault("message", {"role": "assistant", "content": None})
                merge_message(message, value or {})
            elif name == "text":
                choice["text"] = choice.get("text", "") + (value or "")
            elif name == "logprobs" and isinstance(value, Mapping) and choice.get("logprobs"):
                choice["logprobs"] = _joined(choice["logprobs"], value)
            elif isinstance(value, list) and isinstance(choice.get(name), list):
                # its own: chunks are decoded anew
                choice[name] += value
            elif value is not None or name not in choice:
                choice[name] = value


def merge_message(message: dict[str, Any], piece: Mapping[str, Any]) -> None:
    """Add `piece` of a streamed message to `message`: texts and lists grow, tool calls are matched by their index."""
    for name, value in piece.items():
        if name == "tool_calls" and isinstance(value, list):
            # SGLang says null in every piece that has none
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
    known = next((one for one in calls if one.get("index") == index), None)
    if known is None:
        known = {}
        calls.append(known)
    merge_message(known, {"index": index, **call})


def _joined(before: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Columns of log-probabilities, one after the other."""
    names = {**before, **more}
    return {
        name: [*(before.get(name) or ()), *(more.get(name) or ())]
        if isinstance(before.get(name), list) or isinstance(more.get(name), list)
        else more.get(name, before.get(name))
        for name in names
    }
