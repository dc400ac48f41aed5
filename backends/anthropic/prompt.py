"""Requests to Anthropic's API: the client's own body, or its OpenAI body translated. Pure.

Source: Anthropic API reference, "Messages", version 2023-06-01.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from backends.http.unsupported import refuse_unknown, refuse_unsupported
from backends.nesting import decode_json
from backends.openai.answer_schema import schema_in
from backends.openai.messages import content_of
from policies.errors import InvalidRequest
from policies.nouns import Prompt, Request

CHAT_PATH = "/v1/chat/completions"

_KNOWS = ("temperature", "top_p", "top_k", "stop", "grammar")
_OWN = ("thinking", "container", "context_management", "mcp_servers", "inference_geo", "speed")
"""Fields of Anthropic's own that a client of another dialect may put beside its own."""
_COPIED = ("temperature", "top_p", *_OWN)
_READ = (*_OWN, "tools", "tool_choice", "parallel_tool_calls", "reasoning_effort", "response_format")
_IDLE = ("verbosity", "prediction", "modalities", "chat_template_kwargs", "cache_control")
_TIERS = {"auto": "auto", "default": "standard_only", "standard_only": "standard_only"}
"""Others are words of OpenAI's for how fast it is to be."""
_EFFORTS = {"minimal": "low"}
_CHOICES = {"auto": "auto", "required": "any", "none": "none"}


def messages_body(request: Request, prompt: Prompt, model: str) -> dict[str, Any]:
    """A streamed body of /v1/messages for `model`. Raises InvalidRequest for fields without a counterpart."""
    if prompt.body is None or prompt.path != CHAT_PATH:
        hint = "send a chat"
        raise InvalidRequest("Anthropic's API takes conversations, not texts to continue", hint=hint, param="prompt")
    return {"model": model, "stream": True, **_translated(request, prompt.body)}


def _translated(request: Request, body: Mapping[str, Any]) -> dict[str, Any]:
    sampling = request.sampling
    refuse_unsupported(sampling, _KNOWS, "Anthropic's API")
    refuse_unknown(body, (*_READ, *_IDLE), "Anthropic's API")
    if sampling.temperature > 1:
        hint = "from 0 to 1"
        raise InvalidRequest("Anthropic's API has no temperature above 1", hint=hint, param="temperature")
    system, turns = _conversation(body["messages"])
    most = body.get("max_completion_tokens") or body.get("max_tokens") or request.max_new_tokens
    fields: dict[str, Any] = {"max_tokens": most, "messages": turns}
    fields |= {name: body[name] for name in _COPIED if body.get(name) is not None}
    beside = {
        "system": system,
        "top_k": sampling.top_k,
        "stop_sequences": list(sampling.stop),
        "tools": [_tool(tool) for tool in body.get("tools") or ()],
        "output_config": _output_config(body),
        "metadata": {"user_id": body["user"]} if body.get("user") else None,
        "service_tier": _TIERS.get(str(body.get("service_tier"))),
    }
    fields |= {name: value for name, value in beside.items() if value}
    if body.get("reasoning_effort") == "none":
        fields.setdefault("thinking", {"type": "disabled"})
    return fields | (_tool_choice(body) if body.get("tools") else {})


def _conversation(messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Blocks of system text, and turns with alternating roles: results of tools count as the user's."""
    system: list[dict[str, Any]] = []
    turns: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] in ("system", "developer"):
            system += _blocks(content_of(message))
            continue
        role = "assistant" if message["role"] == "assistant" else "user"
        blocks = list(_assistant(message) if role == "assistant" else _user(message))
        if turns and turns[-1]["role"] == role:
            turns[-1]["content"] += blocks
        elif blocks:
            turns.append({"role": role, "content": blocks})
    return system, turns


def _user(message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    if message["role"] == "tool":
        content = _blocks(content_of(message))
        yield {"type": "tool_result", "tool_use_id": message.get("tool_call_id"), "content": content}
    else:
        yield from _blocks(content_of(message))


def _assistant(message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    # only signed thinking is sent back: this model cannot verify another model's thoughts
    yield from message.get("thinking_blocks") or ()
    yield from _blocks(content_of(message))
    for call in message.get("tool_calls") or ():
        function = call["function"]
        called = {"id": call.get("id"), "name": function["name"], "input": _input(function.get("arguments"))}
        yield {"type": "tool_use", **called}


def _input(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments or {}
    try:
        decoded = decode_json(arguments or "{}")
    except msgspec.MsgspecError:
        decoded = None
    # arguments that are not JSON go back in the form that Anthropic recommends
    return decoded if isinstance(decoded, dict) else {"INVALID_JSON": arguments}


def _blocks(content: Any) -> list[dict[str, Any]]:
    """`content` as blocks; an empty text is none, since the API refuses it."""
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content or ()
    return [_block(part) for part in parts if part.get("type", "text") != "text" or part.get("text")]


def _block(part: Mapping[str, Any]) -> dict[str, Any]:
    kind, mark = part.get("type", "text"), {name: part[name] for name in ("cache_control",) if name in part}
    if kind == "text":
        return dict(part)
    if kind == "image_url":
        return {"type": "image", "source": _source(str(part["image_url"].get("url"))), **mark}
    if kind == "file" and part["file"].get("file_data"):
        title = {"title": name} if (name := part["file"].get("filename")) else {}
        return {"type": "document", "source": _source(str(part["file"]["file_data"])), **title, **mark}
    hint = "send text, images, or files by value"
    raise InvalidRequest(f"Anthropic's API takes no part of type '{kind[:40]}'", hint=hint, param="messages")


def _source(url: str) -> dict[str, Any]:
    """The source of an image or a file at `url` in the shape of Anthropic's API: by value (RFC 2397), or by address."""
    head, comma, data = url.partition(";base64,")
    if head.startswith("data:") and comma:
        return {"type": "base64", "media_type": head.removeprefix("data:"), "data": data}
    return {"type": "url", "url": url}


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = tool["function"]
    schema = function.get("parameters") or {"type": "object", "properties": {}}
    fields = {"name": function["name"], "input_schema": schema}
    beside = {name: function.get(name) for name in ("description", "strict")}
    beside["cache_control"] = tool.get("cache_control")
    return fields | {name: value for name, value in beside.items() if value}


def _tool_choice(body: Mapping[str, Any]) -> dict[str, Any]:
    choice, parallel = body.get("tool_choice"), body.get("parallel_tool_calls")
    if choice is None and parallel is not False:
        return {}
    if isinstance(choice, Mapping):
        if choice.get("type") != "function":
            hint = "'auto', 'none', 'required', or {'type': 'function', 'function': {'name': ...}}"
            what = f"Anthropic's API has no tool_choice of type '{str(choice.get('type'))[:40]}'"
            raise InvalidRequest(what, hint=hint, param="tool_choice")
        fields: dict[str, Any] = {"type": "tool", "name": (choice.get("function") or {}).get("name")}
    else:
        fields = {"type": _CHOICES.get(choice or "auto", "auto")}
    if parallel is False and fields["type"] != "none":
        fields["disable_parallel_tool_use"] = True
    return {"tool_choice": fields}


def _output_config(body: Mapping[str, Any]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if (effort := body.get("reasoning_effort")) and effort != "none":
        fields["effort"] = _EFFORTS.get(str(effort), effort)
    shape = body.get("response_format") or {}
    schema = schema_in(shape)
    if shape.get("type") == "json_schema" or (shape.get("type") == "json_object" and schema is not None):
        fields["format"] = {"type": "json_schema", "schema": schema or {}}
    elif shape.get("type") not in (None, "text"):
        hint = "give it a json_schema"
        raise InvalidRequest(
            f"Anthropic's API cannot shape an answer as '{shape['type']}'", hint=hint, param="response_format"
        )
    return fields
