"""Required tool calls as a grammar, for backends without tools. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from msgspec.structs import replace

from policies.nouns import Grammar
from router.ask import Chat
from router.text.schema_kinds import TEXT_ALONE, kinds_of, referred
from router.text.tool_formats import (
    DEEPSEEK_3,
    DEEPSEEK_31,
    GLM_45,
    HARMONY,
    HERMES,
    LLAMA,
    MISTRAL,
    MISTRAL_11,
    PHI_4,
    QWEN_3_CODER,
    ToolFormat,
)

FIELD = "tool_choice"

_OF_NOTHING: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
_COMPACT = {"whitespace_flexible": False}
"""Arguments are for programs: no spaces."""

_QUOTED, _NAME, _ARGUMENTS, _PAIRS = "\x00quoted", "\x00name", "\x00arguments", "\x00pairs"
"""What stands for the name of a tool, in JSON or as it is, and for its arguments in a layout."""

_WHITE_SPACE = r"/[ \n]{0,2}/"
"""What may follow the last call. Qwen 2.5 writes a line break there, and would have to call again without this."""


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


class CallLayout(NamedTuple):
    """The texts and marks of a format, in order: before all calls, of one call, between two calls, behind all.

    Without `between` only one call can be made. Marks are those of its texts that may be tokens. Behind all of it some
    white space may follow, as models write some before they end.
    """

    begins: tuple[str, ...]
    call: tuple[str, ...]
    ends: tuple[str, ...] = ()
    between: tuple[str, ...] | None = ()


_OBJECT = ('{"name": ', _QUOTED, ', "arguments": ', _ARGUMENTS, "}")

_LAYOUTS = {
    HERMES.name: CallLayout((), ("<tool_call>", "\n", *_OBJECT, "\n", "</tool_call>"), between=("\n",)),
    LLAMA.name: CallLayout((), ('{"name": ', _QUOTED, ', "parameters": ', _ARGUMENTS, "}"), between=None),
    MISTRAL.name: CallLayout(("[TOOL_CALLS]", "["), _OBJECT, ("]",), between=(", ",)),
    MISTRAL_11.name: CallLayout((), ("[TOOL_CALLS]", _NAME, "[ARGS]", _ARGUMENTS)),
    PHI_4.name: CallLayout(("<|tool_call|>", "["), _OBJECT, ("]", "<|/tool_call|>"), between=(", ",)),
    DEEPSEEK_3.name: CallLayout(
        ("<｜tool▁calls▁begin｜>",),
        (
            *("<｜tool▁call▁begin｜>", "function", "<｜tool▁sep｜>", _NAME),
            *("\n```json\n", _ARGUMENTS, "\n```", "<｜tool▁call▁end｜>"),
        ),
        ("<｜tool▁calls▁end｜>",),
        between=("\n",),
    ),
    DEEPSEEK_31.name: CallLayout(
        ("<｜tool▁calls▁begin｜>",),
        ("<｜tool▁call▁begin｜>", _NAME, "<｜tool▁sep｜>", _ARGUMENTS, "<｜tool▁call▁end｜>"),
        ("<｜tool▁calls▁end｜>",),
    ),
    # the answer ends behind the arguments: the mark of their end is one of its ends
    HARMONY.name: CallLayout(
        (),
        ("<|channel|>", "commentary to=functions.", _NAME, " ", "<|constrain|>", "json", "<|message|>", _ARGUMENTS),
        between=None,
    ),
    GLM_45.name: CallLayout((), ("<tool_call>", _NAME, "\n", _PAIRS, "</tool_call>"), between=("\n",)),
    QWEN_3_CODER.name: CallLayout(
        (),
        ("<tool_call>", "\n", "<function=", _NAME, ">\n", _PAIRS, "</function>", "\n", "</tool_call>"),
        between=("\n",),
    ),
}

_PAIR_LAYOUTS = {
    GLM_45.name: (("<arg_key>", _NAME, "</arg_key>", "\n", "<arg_value>"), ("</arg_value>", "\n")),
    QWEN_3_CODER.name: (("<parameter=", _NAME, ">\n"), ("\n</parameter>\n",)),
}
"""What stands before and behind the value of an argument."""


def _rules(
    tools: list[Mapping[str, Any]], tool_format: ToolFormat, id_of: Callable[[str], int | None], *, one_call: bool
) -> Iterator[str]:
    """The lines of a grammar in Lark for llguidance: `start`, and rules for each tool."""
    layout = _LAYOUTS[tool_format.name]

    def written(texts: Sequence[str]) -> list[str]:
        return [_mark(text, id_of) for text in texts]

    several = (
        [] if one_call or layout.between is None else ["(" + " ".join([*written(layout.between), "any_call"]) + ")*"]
    )
    yield "start: " + " ".join([*written(layout.begins), "any_call", *several, *written(layout.ends), _WHITE_SPACE])
    yield "any_call: " + " | ".join(f"call_{at}" for at in range(len(tools)))
    for at, tool in enumerate(tools):
        schema = tool.get("parameters") or _OF_NOTHING
        pairs, rules = _pairs(schema, at, tool_format, id_of) if _PAIRS in layout.call else ("", [])
        parts = {
            _QUOTED: _literal(json.dumps(tool["name"])),
            _NAME: _literal(tool["name"]),
            _ARGUMENTS: _json(schema),
            _PAIRS: pairs,
        }
        yield f"call_{at}: " + " ".join(
            parts.get(text) or _mark(text, id_of) for text in layout.call if parts.get(text) != ""
        )
        yield from rules


def _pairs(
    schema: Mapping[str, Any], tool: int, tool_format: ToolFormat, id_of: Callable[[str], int | None]
) -> tuple[str, list[str]]:
    """Arguments as pairs of key and value, in the schema's order, and their rules. Optional ones may be left out."""
    properties = schema.get("properties") or {}
    required = set(schema.get("required") or ())
    names: list[str] = []
    rules: list[str] = []
    for at, (key, value) in enumerate(properties.items()):
        name = f"pair_{tool}_{at}"
        before, behind = (
            " ".join(_literal(key) if text == _NAME else _mark(text, id_of) for text in texts)
            for texts in _PAIR_LAYOUTS[tool_format.name]
        )
        rules.append(f"{name}: {before} {_bare_value(value, schema)} {behind}")
        names.append(name if key in required else f"{name}?")
    return " ".join(names), rules


def _bare_value(schema: Any, root: Mapping[str, Any]) -> str:
    """A value in Lark: a text without quotation marks, or JSON. `root` has the parts that it refers to."""
    if kinds_of(schema, root) != TEXT_ALONE:
        parts = {name: root[name] for name in ("$defs", "definitions") if name in root}
        return _json({**parts, **schema} if isinstance(schema, Mapping) else schema)
    if isinstance(schema.get("$ref"), str):
        schema = {**(referred(schema["$ref"], root) or {}), **schema}
    choices = [schema["const"]] if "const" in schema else schema.get("enum")
    if choices:
        return "(" + " | ".join(map(_literal, choices)) + ")"
    # an angle bracket would begin a mark
    return f"/[^<]{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}}/"


def _json(schema: Any) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': _COMPACT} if isinstance(schema, Mapping) else schema)}"


def _literal(text: str) -> str:
    return json.dumps(text)


def _mark(mark: str, id_of: Callable[[str], int | None]) -> str:
    """`mark` in Lark: its special token, or else its text."""
    number = id_of(mark) if len(mark) > 2 and mark[0] in "<[" and mark[-1] in ">]" else None
    return _literal(mark) if number is None else f"<[{number}]>"
