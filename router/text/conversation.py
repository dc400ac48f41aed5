"""Messages and tools as chat templates see them: the members that engines pass on, in the engines' order.

Templates print parts of them as JSON, so the order and the members change the number of tokens.

Source: vLLM 0.32, `POST /v1/chat/completions` with a template that prints everything.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from backends.nesting import is_deep
from router.ask import Chat

Message = Mapping[str, Any]

_BILLING = "x-anthropic-billing-header"
"""First line of Claude Code's prompts, different in each request; engines drop it from system messages."""


class Arguments(dict[str, Any]):
    """The arguments of a call as an object, with their `text` as the client wrote it."""

    __slots__ = ("text",)

    def __init__(self, given: Mapping[str, Any], text: str) -> None:
        super().__init__(given)
        self.text = text


def message_of(raw: Mapping[str, Any], parts: Sequence[Mapping[str, Any]]) -> Message:
    """The client's message `raw`, with its `parts` of text as one text."""
    role = raw["role"]
    text = parts[0]["text"] if len(parts) == 1 else "\n".join([part["text"] for part in parts])
    message: dict[str, Any] = {"role": role, "content": text}
    if role == "assistant":
        if calls := raw.get("tool_calls"):
            message["tool_calls"] = [_call(call) for call in calls]
        reasoning = raw.get("reasoning")
        reasoning = raw.get("reasoning_content") if reasoning is None else reasoning
        if reasoning is not None:
            message["reasoning"] = message["reasoning_content"] = reasoning
    elif role == "tool" and "tool_call_id" in raw:
        message["tool_call_id"] = raw["tool_call_id"]
    for name in ("name", "task"):
        if isinstance(raw.get(name), str):
            message[name] = raw[name]
    if role == "developer":
        message["tools"] = raw.get("tools")
    return message


def tool_of(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The client's tool `raw`, as templates see it."""
    function, deferred = raw["function"], raw.get("defer_loading")
    described = {name: function.get(name) for name in ("name", "description", "parameters")}
    loading = deferred if function.get("defer_loading") is None else function["defer_loading"]
    more = {"strict": function.get("strict"), "defer_loading": loading}
    described |= {name: value for name, value in more.items() if value is not None}
    tool = {"type": raw.get("type", "function"), "function": described}
    return tool if deferred is None else {**tool, "defer_loading": deferred}


def without_billing(parts: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """`parts` of a system message without billing lines."""
    kept: list[Mapping[str, Any]] = []
    for part in parts:
        if not part.get("text", "").startswith(_BILLING):
            kept.append(part)
        elif rest := part["text"].partition("\n")[2]:
            kept.append({**part, "text": rest})
    return kept


def seen_by_template(chat: Chat, *, wants_parts: bool, knows_developers: bool) -> list[Message]:
    """The messages of `chat` for a template. `wants_parts`: content as parts, else as text. Without
    `knows_developers`, messages of developers become system messages, all in one at the beginning."""
    messages = list(chat.messages)
    if wants_parts:
        messages = [_in_parts(message, chat.parts.get(at)) for at, message in enumerate(messages)]
    if knows_developers or all(message["role"] != "developer" for message in messages):
        return messages
    return _with_one_system_message([_as_system(message) for message in messages])


def _in_parts(message: Message, parts: Sequence[Mapping[str, Any]] | None) -> Message:
    """`message` with its content as a list; the result of a tool stays one text, and no content stays none."""
    if message["role"] == "tool" or message["content"] is None:
        return message
    alone = [{"type": "text", "text": message["content"]}]
    return {**message, "content": alone if parts is None else list(parts)}


def _as_system(message: Message) -> Message:
    if message["role"] != "developer":
        return message
    return {**{name: value for name, value in message.items() if name != "tools"}, "role": "system"}


def _with_one_system_message(messages: list[Message]) -> list[Message]:
    places = [at for at, message in enumerate(messages) if message["role"] == "system"]
    if places in ([], [0]):
        return messages
    texts = [_text(messages[at]["content"]) for at in places]
    whole = {"role": "system", "content": "\n\n".join(text for text in texts if text)}
    return [whole, *(message for message in messages if message["role"] != "system")]


def _text(content: str | Sequence[Mapping[str, Any]]) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = {**call["function"], "arguments": _arguments(call["function"].get("arguments"))}
    ordered = {name: function.pop(name) for name in ("arguments", "name")}
    return {
        **({"id": call["id"]} if "id" in call else {}),
        "function": ordered | function,
        **{name: value for name, value in call.items() if name not in ("id", "function")},
    }


def _arguments(given: Any) -> Arguments:
    """The arguments of a call; an empty object if they are none, so that the conversation can continue."""
    if not isinstance(given, str):
        found = given if isinstance(given, dict) and not is_deep(given) else {}
        return Arguments(found, json.dumps(found, ensure_ascii=False))
    try:
        # json and not msgspec: numbers must print as in engines
        found = json.loads(given)
    except (ValueError, RecursionError):
        found = {}
    return Arguments(found if isinstance(found, dict) and not is_deep(found) else {}, given or "{}")
