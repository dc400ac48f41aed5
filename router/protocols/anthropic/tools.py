"""Tools of Anthropic's messages API as functions of chats.

Tools that Anthropic defines and the client runs have a schema that its models know; other models get it written out.
Tools that run at Anthropic's servers are left out: no backend that needs a translation has them.

Source: Anthropic API reference, "Tool use" (bash, text editor, memory and computer tools).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from policies.errors import InvalidRequest
from router.protocols.anthropic.fields import ToolDefinition

_TEXT, _NUMBER = {"type": "string"}, {"type": "integer"}
_PLACE = {"type": "array", "items": _NUMBER, "minItems": 2, "maxItems": 2}


def _schema(required: Sequence[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required)}


_EDITS = {
    "path": _TEXT, "file_text": _TEXT, "old_str": _TEXT, "new_str": _TEXT, "insert_line": _NUMBER,
    "insert_text": _TEXT, "view_range": _PLACE,
}  # fmt: skip
_VERSION = re.compile(r"_(\d{8})$")

_KNOWN: Mapping[str, tuple[str, dict[str, Any]]] = {
    "bash": ("Runs a command in a shell that stays open.", _schema((), command=_TEXT, restart={"type": "boolean"})),
    "text_editor": (
        "Views and edits files.",
        _schema(
            ("command", "path"), command={"enum": ["view", "create", "str_replace", "insert", "undo_edit"]}, **_EDITS
        ),
    ),
    "memory": (
        "Keeps notes in files below /memories.",
        _schema(
            ("command",),
            command={"enum": ["view", "create", "str_replace", "insert", "delete", "rename"]},
            **_EDITS,
            old_path=_TEXT,
            new_path=_TEXT,
        ),
    ),
    "computer": (
        "Uses a screen, a mouse and a keyboard.",
        _schema(
            ("action",),
            action=_TEXT,
            coordinate=_PLACE,
            start_coordinate=_PLACE,
            text=_TEXT,
            duration={"type": "number"},
            scroll_direction={"enum": ["up", "down", "left", "right"]},
            scroll_amount=_NUMBER,
        ),
    ),
}
"""Type of a tool that Anthropic defines and the client runs, without its version -> a description, and its schema."""


def functions_of(tools: Sequence[ToolDefinition]) -> list[dict[str, Any]]:
    """The functions of a chat for `tools`. Raises InvalidRequest for a tool of the client's own without a name."""
    return [function for at, tool in enumerate(tools) if (function := _function(tool, at)) is not None]


def _function(tool: ToolDefinition, at: int) -> dict[str, Any] | None:
    schema, description = tool.input_schema, tool.description
    if tool.type not in (None, "custom"):
        known = _KNOWN.get(_VERSION.sub("", tool.type or ""))
        if known is None:
            return None
        description, schema = description or known[0], schema or known[1]
    if not tool.name:
        hint = "a tool is {'name': ..., 'description': ..., 'input_schema': {...}}"
        raise InvalidRequest(f"tools[{at}]: a tool needs a name", hint=hint, param=f"tools[{at}].name")
    function: dict[str, Any] = {"name": tool.name, "parameters": schema or {"type": "object", "properties": {}}}
    if description is not None:
        function["description"] = description
    if tool.strict is not None:
        function["strict"] = tool.strict
    mark = {"cache_control": tool.cache_control} if tool.cache_control else {}
    return {"type": "function", "function": function, **mark}
