"""Tools of OpenAI's Responses API as functions of chats, and calls of these functions as items of that API.

Functions in a namespace get its name in front. A custom tool is a function of one text. Tools that run at the provider
are left out: no backend that needs a translation has them.

Source: OpenAI API reference, "Responses" (tools; items function_call, custom_tool_call, local_shell_call).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from backends.nesting import decode_json
from policies.errors import InvalidRequest
from router.protocols.dialect import converted
from router.protocols.responses.fields import ResponseTool

SHELL = "local_shell"
_BETWEEN = "__"
_INPUT = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}
_COMMAND: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "command": {"type": "array", "items": {"type": "string"}},
        "working_directory": {"type": "string"},
        "timeout_ms": {"type": "integer"},
    },
    "required": ["command"],
}


class Origin(NamedTuple):
    """The tool that a function of a chat stands for: its `type`, its `name`, and the namespace that it is in."""

    type: str
    name: str
    namespace: str | None = None


def in_namespace(name: str, namespace: str | None) -> str:
    """The name of the function of a chat for `name` in `namespace`."""
    if not namespace:
        return name
    return namespace + name if namespace.endswith(_BETWEEN) else f"{namespace}{_BETWEEN}{name}"


def functions_of(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The functions of a chat for `tools`. Raises InvalidRequest."""
    return [function for function, _ in _each(tools)]


def origins_of(tools: Sequence[Mapping[str, Any]]) -> dict[str, Origin]:
    """Name of each function of the chat -> its tool, where that is no plain function."""
    return {function["function"]["name"]: origin for function, origin in _each(tools) if origin != _plain(origin.name)}


def _plain(name: str) -> Origin:
    return Origin("function", name)


def _each(tools: Sequence[Mapping[str, Any]]) -> Iterator[tuple[dict[str, Any], Origin]]:
    for at, raw in enumerate(tools):
        if raw.get("type") == "namespace":
            inner = raw.get("tools")
            for number, each in enumerate(inner if isinstance(inner, list) else ()):
                yield from _one(each, f"tools[{at}].tools[{number}]", str(raw.get("name") or ""))
        else:
            yield from _one(raw, f"tools[{at}]")


def _one(raw: Any, where: str, namespace: str | None = None) -> Iterator[tuple[dict[str, Any], Origin]]:
    kind = raw.get("type") if isinstance(raw, Mapping) else None
    if not isinstance(kind, str):
        raise InvalidRequest(f"{where}: a tool needs a `type`", hint=_HINTS["tools"], param=f"{where}.type")
    if kind == SHELL:
        described = "Runs a command at the user's computer."
        yield _function(SHELL, {"description": described, "parameters": _COMMAND}), Origin(SHELL, SHELL)
    if kind not in ("function", "custom"):
        return
    tool = converted(raw, ResponseTool, hints=_HINTS, elsewhere=_HINTS["tools"])
    if not tool.name:
        raise InvalidRequest(f"{where}: a {kind} needs a name", hint=_HINTS["tools"], param=f"{where}.name")
    name = in_namespace(tool.name, namespace)
    given: dict[str, Any]
    if kind == "custom":
        grammar = tool.format.get("definition") if tool.format else None
        texts = (tool.description, f"The input follows this grammar:\n{grammar}" if grammar else None)
        given = {"description": "\n\n".join(filter(None, texts)) or None, "parameters": _INPUT}
    else:
        given = {"description": tool.description, "parameters": tool.parameters, "strict": tool.strict}
    yield _function(name, given), Origin(kind, tool.name, namespace)


_HINTS = {"tools": "a tool is {'type': 'function', 'name': ..., 'parameters': {...}}"}


def _function(name: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    given = {field: value for field, value in fields.items() if value is not None}
    return {"type": "function", "function": {"name": name, **given}}


def item_of(call_id: Any, name: Any, origins: Mapping[str, Origin]) -> dict[str, Any]:
    """The item of a call of the function `name`, before it has arguments."""
    origin = origins.get(name)
    if origin is None:
        return {"type": "function_call", "call_id": call_id, "name": name, "arguments": ""}
    if origin.type == "custom":
        return {"type": "custom_tool_call", "call_id": call_id, **_named(origin), "input": ""}
    if origin.type == SHELL:
        return {"type": "local_shell_call", "call_id": call_id, "action": action_of("")}
    return {"type": "function_call", "call_id": call_id, **_named(origin), "arguments": ""}


def _named(origin: Origin) -> dict[str, Any]:
    beside = {} if origin.namespace is None else {"namespace": origin.namespace}
    return {"name": origin.name, **beside}


def input_of(arguments: str) -> str:
    """The input of a custom tool in the arguments of its function; all of them, if the model did not follow it."""
    value = _object(arguments).get("input")
    return value if isinstance(value, str) else arguments


def action_of(arguments: str) -> dict[str, Any]:
    """The action of a local shell in the arguments of its function."""
    given = _object(arguments)
    command = given.get("command")
    command = ["sh", "-c", command] if isinstance(command, str) else command
    words = [str(word) for word in command] if isinstance(command, list) else []
    beside = {name: given[name] for name in ("working_directory", "timeout_ms") if given.get(name) is not None}
    return {"type": "exec", "command": words, "env": {}, **beside}


def _object(arguments: str) -> dict[str, Any]:
    try:
        given = decode_json(arguments)
    except msgspec.MsgspecError:
        return {}
    return given if isinstance(given, dict) else {}
