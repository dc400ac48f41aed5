"""Parses OpenAI's Responses API: a body becomes an Ask, by way of an equivalent chat body.

Stateless: the router stores no answers, so references to an earlier one are errors, and `store` has no effect.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from backends.openai.responses import RESPONSES_PATH
from policies.errors import InvalidRequest
from policies.nouns import Native
from router.ask import Ask
from router.protocols.dialect import converted, members_beyond
from router.protocols.openai.grammars import from_field
from router.protocols.openai.request import chat_ask
from router.protocols.responses.fields import Format, Item, ResponsePart, ResponsesBody
from router.protocols.responses.tools import SHELL, functions_of, in_namespace

_HINTS = {
    "model": "GET /v1/models lists the models",
    "input": "`input` is a text, or a list of items such as {'role': 'user', 'content': 'Hello'}",
    "max_output_tokens": "leave it out to get as much as fits",
    "temperature": "0 is greedy, 1 the default, 2 the most",
    "tools": "a tool is {'type': 'function', 'name': ..., 'parameters': {...}}",
}
_ELSEWHERE = "see OpenAI's API reference for this field"
_STATEFUL = {
    "previous_response_id": "send the whole conversation in `input`",
    "conversation": "send the whole conversation in `input`",
    "prompt": "send `instructions` and `input`",
    "background": "leave it out, and stream",
}
_SAME = ("temperature", "top_p", "stream", "user", "parallel_tool_calls")
_IDLE = ("store", "truncation", "max_tool_calls", "stream_options", "context_management")
"""Fields without effect, because no answers are stored, nothing is truncated and no tools are run."""
_INSTEAD = {
    "messages": "say `input`",
    "n": "send several calls",
    "max_tokens": "use `max_output_tokens`",
    "max_completion_tokens": "use `max_output_tokens`",
    "response_format": "say `text.format`",
    "logprobs": "say `top_logprobs`",
    "functions": "say `tools`",
    "function_call": "say `tool_choice`",
    "continue_final_message": "end with a message of the user",
    "add_generation_prompt": "end with a message of the user",
}
_ITEMS = frozenset(
    {"message", "reasoning", "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output"}
    | {"local_shell_call", "local_shell_call_output"}
)
"""Items that a chat can have. Others tell of tools that ran at the provider, or only the provider can read them."""
_LOGPROBS = "message.output_text.logprobs"
_TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


def responses_ask(body: Mapping[str, Any], headers: Mapping[str, str]) -> Ask:
    """The Ask of a body of /v1/responses. `headers` have lower-case names. Raises InvalidRequest."""
    fields = converted(body, ResponsesBody, hints=_HINTS, elsewhere=_ELSEWHERE)
    for name, hint in _STATEFUL.items():
        if getattr(fields, name):
            raise InvalidRequest(f"{name}: this router stores no answers", hint=hint, param=name)
    more = members_beyond(body, ResponsesBody, idle=_IDLE, instead=_INSTEAD)
    ask = chat_ask(more | _chat(fields), headers)
    # metadata are for rules and the response; OpenAI rejects them in a chat that is not stored
    sampling = from_field("text.format", ask.sampling)
    return replace(ask, natives=(Native(RESPONSES_PATH, body),), metadata=fields.metadata or {}, sampling=sampling)


def _chat(fields: ResponsesBody) -> dict[str, Any]:
    chat: dict[str, Any] = {"model": fields.model, "messages": _messages(fields)}
    chat |= {name: value for name in _SAME if (value := getattr(fields, name)) is not None}
    if fields.max_output_tokens is not None:
        chat["max_tokens"] = fields.max_output_tokens
    if fields.tools:
        functions = functions_of(fields.tools)
        if fields.tool_choice is not None:
            functions, choice = _chosen(functions, fields.tool_choice)
            chat["tool_choice"] = choice
        if functions:
            chat["tools"] = functions
        else:
            chat.pop("tool_choice", None)
            chat.pop("parallel_tool_calls", None)
    elif fields.tool_choice is not None:
        chat["tool_choice"] = _chosen([], fields.tool_choice)[1]
    if fields.top_logprobs is not None or _LOGPROBS in (fields.include or ()):
        chat |= {"logprobs": True, "top_logprobs": fields.top_logprobs or 0}
    if fields.reasoning is not None and fields.reasoning.effort is not None:
        chat["reasoning_effort"] = fields.reasoning.effort
    if fields.text is not None and fields.text.verbosity is not None:
        chat["verbosity"] = fields.text.verbosity
    if fields.text is not None and fields.text.format is not None and fields.text.format.type != "text":
        chat["response_format"] = _response_format(fields.text.format)
    return chat


def _messages(fields: ResponsesBody) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if fields.instructions:
        messages.append({"role": "system", "content": fields.instructions})
    if isinstance(fields.input, str):
        return [*messages, {"role": "user", "content": fields.input}]
    for at, raw in enumerate(fields.input):
        if raw.get("type", "message") in _ITEMS:
            _add(messages, _item(raw, f"input[{at}]"), f"input[{at}]")
    if not messages:
        hint = "send a message"
        raise InvalidRequest("input: no item says anything to a model without OpenAI's tools", hint=hint, param="input")
    return messages


def _item(raw: Mapping[str, Any], where: str) -> Item:
    try:
        return msgspec.convert(raw, Item)
    except msgspec.ValidationError as error:
        what, _, path = str(error).partition(" - at `$")
        param = where + path.rstrip("`")
        raise InvalidRequest(f"{param}: {what}", hint=_HINTS["input"], param=param) from None


def _add(messages: list[dict[str, Any]], item: Item, where: str) -> None:
    """Add `item`; one turn of the assistant may be several items and becomes one message."""
    if item.type == "message":
        if item.role is None:
            raise InvalidRequest(f"{where}: a message needs a role", hint="such as 'user'", param=f"{where}.role")
        content = _content(item.content, f"{where}.content")
        if item.role == "assistant":
            _turn(messages, "content")["content"] = content
        else:
            messages.append({"role": item.role, "content": content})
    elif item.type == "reasoning":
        thought = _text(item.content or item.summary, where)
        if thought:
            _turn(messages, "reasoning_content", "content", "tool_calls")["reasoning_content"] = thought
    elif item.type.endswith("_output"):
        content = _content(item.output, f"{where}.output")
        messages.append({"role": "tool", "tool_call_id": _named(item, where), "content": content})
    else:
        function = _called(item)
        call = {"id": _named(item, where), "type": "function", "function": function}
        _turn(messages).setdefault("tool_calls", []).append(call)


def _called(item: Item) -> dict[str, Any]:
    """The function of a chat that a call of a tool is."""
    if item.type == "custom_tool_call":
        arguments = msgspec.json.encode({"input": item.input or ""}).decode()
    elif item.type == "local_shell_call":
        action = {name: value for name, value in (item.action or {}).items() if name not in ("type", "env") and value}
        return {"name": SHELL, "arguments": msgspec.json.encode(action).decode()}
    else:
        arguments = item.arguments or "{}"
    return {"name": in_namespace(item.name or "", item.namespace), "arguments": arguments}


def _turn(messages: list[dict[str, Any]], *unless: str) -> dict[str, Any]:
    """The assistant's message at the end, if it has none of the fields `unless`; else a new one."""
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or any(last.get(name) for name in unless):
        last = {"role": "assistant", "content": None}
        messages.append(last)
    return last


def _named(item: Item, where: str) -> str:
    if not item.call_id:
        hint = "send the call_id of the function_call"
        raise InvalidRequest(f"{where}: a {item.type} needs a call_id", hint=hint, param=f"{where}.call_id")
    return item.call_id


def _content(content: str | Sequence[ResponsePart] | None, where: str) -> str | list[dict[str, Any]]:
    """One text, or parts in the shape of chats if some are not text."""
    if content is None or isinstance(content, str) or all(_media(part) is None for part in content):
        return _text(content, where)
    parts = enumerate(content)
    return [_media(part) or {"type": "text", "text": _text((part,), where, at)} for at, part in parts]


def _media(part: ResponsePart) -> dict[str, Any] | None:
    if part.type == "input_image" and part.image_url:
        detail = {} if part.detail is None else {"detail": part.detail}
        return {"type": "image_url", "image_url": {"url": part.image_url, **detail}}
    if part.type == "input_file" and part.file_data:
        return {"type": "file", "file": {"filename": part.filename or "file", "file_data": part.file_data}}
    return None


def _text(content: str | Sequence[ResponsePart] | None, where: str, first: int = 0) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    for at, part in enumerate(content, first):
        if _text_in(part) is None:
            param, hint = f"{where}[{at}]", "input_text, and input_image and input_file by URL or value, are"
            raise InvalidRequest(f"{param}: parts of type '{part.type[:40]}' are not supported", hint=hint, param=param)
    return "".join(_text_in(part) or "" for part in content)


def _text_in(part: ResponsePart) -> str | None:
    """The text of `part`; None if it has none."""
    if part.type == "refusal":
        return part.refusal
    return part.text if part.type in _TEXT_PARTS else None


def _chosen(
    functions: list[dict[str, Any]], choice: str | Mapping[str, Any]
) -> tuple[list[dict[str, Any]], str | dict[str, Any]]:
    """The functions that may be called, and the choice as a chat has it. Raises InvalidRequest."""
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        tools = choice.get("tools")
        each = (tool for tool in (tools if isinstance(tools, list) else ()) if isinstance(tool, Mapping))
        names = {SHELL if tool.get("type") == SHELL else _name_in(tool) for tool in each}
        functions = [function for function in functions if function["function"]["name"] in names]
        choice = str(choice.get("mode") or "auto")
    if choice == "required" and not functions:
        what = "tool_choice: a tool is required, and no tool of the request can be used with this model"
        raise InvalidRequest(what, hint="give a function, or leave it to the model", param="tool_choice")
    if isinstance(choice, str):
        return functions, choice
    kind = choice.get("type")
    if kind == SHELL:
        return functions, {"type": "function", "function": {"name": SHELL}}
    if kind in ("function", "custom") and isinstance(choice.get("name"), str):
        return functions, {"type": "function", "function": {"name": _name_in(choice)}}
    hint = "'auto', 'none', 'required', or {'type': 'function', 'name': ...}"
    raise InvalidRequest("tool_choice names no tool that the client runs", hint=hint, param="tool_choice")


def _name_in(tool: Mapping[str, Any]) -> str:
    return in_namespace(str(tool.get("name")), tool.get("namespace"))


def _response_format(shape: Format) -> dict[str, Any]:
    if shape.type == "json_object":
        return {"type": "json_object"}
    fields = {"name": shape.name, "schema": shape.schema, "strict": shape.strict, "description": shape.description}
    return {"type": "json_schema", "json_schema": {name: value for name, value in fields.items() if value is not None}}
