"""Required tool calls as a grammar, for backends without tools. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from msgspec.structs import replace

from policies.nouns import Grammar
from router.ask import Chat
from router.text.tool_calls import HERMES, MISTRAL, ToolFormat

FIELD = "tool_choice"

_OF_NOTHING: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
_COMPACT = {"whitespace_flexible": False}
"""Arguments are for programs: no spaces."""


def grammar_of(chat: Chat, tool_format: ToolFormat | None, id_of: Callable[[str], int | None]) -> Grammar | None:
    """The grammar of answers to `chat`; None if calls are optional or the model has no format.

    `id_of` gives the token that is exactly a text, if there is one: marks around calls often are tokens.
    """
    tools = [tool["function"] for tool in chat.tools or () if tool["function"]["name"] in chat.forced]
    if not tools or tool_format is None:
        return None
    rules = "\n".join(_rules(tools, tool_format, id_of, one_call=chat.one_call))
    return Grammar("rules", rules, FIELD)


def with_tools_listed(chat: Chat) -> Chat:
    """`chat` with its tools in a system message, for a model with a template that does not show them."""
    tools = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in chat.tools or ())
    text = f"You may call these functions:\n{tools}"
    first, parts = chat.messages[0], dict(chat.parts)
    if first["role"] != "system":
        later = {at + 1: some for at, some in parts.items()}
        return replace(chat, messages=[{"role": "system", "content": text}, *chat.messages], parts=later)
    parts.pop(0, None)
    system = {**first, "content": f"{first['content']}\n\n{text}"}
    return replace(chat, messages=[system, *chat.messages[1:]], parts=parts)


def _rules(
    tools: list[Mapping[str, Any]], tool_format: ToolFormat, id_of: Callable[[str], int | None], *, one_call: bool
) -> Iterator[str]:
    """The lines of a grammar in Lark for llguidance: `start`, and a rule for each tool."""
    opens, closes = (_mark(mark, id_of) for mark in (tool_format.opens, tool_format.closes))
    any_call = " | ".join(f"call_{at}" for at in range(len(tools)))
    several = "" if one_call else f' ("\\n" {opens} "\\n" any_call "\\n" {closes})*'
    if tool_format is HERMES:
        yield f'start: {opens} "\\n" any_call "\\n" {closes}{several}'
    elif tool_format is MISTRAL:
        more = "" if one_call else ' (", " any_call)*'
        yield f'start: {opens} "[" any_call{more} "]"'
    else:
        yield "start: any_call"
    yield f"any_call: {any_call}"
    arguments = "arguments" if tool_format in (HERMES, MISTRAL) else "parameters"
    for at, tool in enumerate(tools):
        begins = f'{{"name": {json.dumps(tool["name"])}, "{arguments}": '
        schema = {**(tool.get("parameters") or _OF_NOTHING), "x-guidance": _COMPACT}
        yield f'call_{at}: {json.dumps(begins)} %json {json.dumps(schema)} "}}"'


def _mark(mark: str, id_of: Callable[[str], int | None]) -> str:
    """`mark` in Lark: its special token, or else its text."""
    number = id_of(mark)
    return json.dumps(mark) if number is None else f"<[{number}]>"
