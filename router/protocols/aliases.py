"""Changes the body of a request for an alias of a model, by the names of its dialect, before it is parsed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from backends.http.json_members import ABSENT, with_members
from policies.aliases import Alias
from policies.errors import InvalidRequest

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES = "/v1/messages"

_NAMES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    CHAT: {
        "max_tokens": ("max_tokens", "max_completion_tokens"),
        "max_completion_tokens": ("max_completion_tokens", "max_tokens"),
    },
    RESPONSES: {"max_tokens": ("max_output_tokens",), "max_completion_tokens": ("max_output_tokens",)},
    MESSAGES: {"max_completion_tokens": ("max_tokens",), "stop": ("stop_sequences",)},
}
"""By path, members of chats that have other names there: the one to set first, then those that mean the same."""

_LISTS = frozenset({"stop_sequences"})


def aliased(body: Mapping[str, Any], path: str, aliases: Mapping[str, Alias]) -> dict[str, Any]:
    """The members of `body` that change because its model is one of `aliases`; ABSENT for those that are left out.

    Empty if it is none. Raises InvalidRequest for a system prompt where none can stand.
    """
    alias = aliases.get(name) if aliases and isinstance(name := body.get("model"), str) else None
    if alias is None:
        return {}
    path = _dialect_of(path, body)
    changes: dict[str, Any] = {each: ABSENT for name in alias.remove for each in _names(name, path) if each in body}
    for name, value in alias.defaults.items():
        names = _names(name, path)
        if not any(body.get(each) is not None for each in names):
            changes[names[0]] = _value(names[0], value)
    for name, value in alias.force.items():
        first, *others = _names(name, path)
        changes |= {each: ABSENT for each in others if each in body}
        changes[first] = _value(first, value)
    return changes if alias.system is None else {**changes, **_with_system(body, path, alias.system)}


def _dialect_of(path: str, body: Mapping[str, Any]) -> str:
    """The path of the dialect in which a body at `path` is written: other calls take bodies of chats and texts too."""
    if path.startswith(MESSAGES):
        return MESSAGES
    if path in _NAMES:
        return path
    return CHAT if "messages" in body else path


def changed(body: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`body` with the members `changes`."""
    return {name: value for name, value in {**body, **changes}.items() if value is not ABSENT}


def changed_bytes(raw: bytes, changes: Mapping[str, Any]) -> bytes:
    """`raw`, the bytes of a body, with the members `changes` and every other byte as it came. Raises InvalidRequest."""
    try:
        return with_members(raw, changes)
    except (TypeError, OverflowError) as error:
        raise InvalidRequest(f"the body cannot be written again: {error}", hint="send smaller numbers") from error


def _names(name: str, path: str) -> tuple[str, ...]:
    return _NAMES.get(path, {}).get(name, (name,))


def _value(name: str, value: Any) -> Any:
    return [value] if name in _LISTS and not isinstance(value, list) else value


def _with_system(body: Mapping[str, Any], path: str, text: str) -> dict[str, Any]:
    """The member that has the system prompt, with `text` in front."""
    if path == RESPONSES:
        return {"instructions": _before(text, body.get("instructions"))}
    if path == MESSAGES:
        return {"system": _before(text, body.get("system"))}
    messages = body.get("messages")
    if path == CHAT and isinstance(messages, list):
        first = messages[0] if messages else None
        if isinstance(first, dict) and first.get("role") in ("system", "developer"):
            return {"messages": [{**first, "content": _before(text, first.get("content"))}, *messages[1:]]}
        return {"messages": [{"role": "system", "content": text}, *messages]}
    if path == CHAT:
        # parsing will object to it
        return {}
    hint = f"it has a system prompt: use it with {CHAT}, {RESPONSES} or {MESSAGES}"
    raise InvalidRequest(f"the model '{body['model']}' cannot be used here", hint=hint, param="model")


def _before(text: str, content: Any) -> Any:
    """`text`, then the `content` of a system prompt."""
    if isinstance(content, list):
        return [{"type": "text", "text": f"{text}\n\n"}, *content]
    return f"{text}\n\n{content}" if content else text
