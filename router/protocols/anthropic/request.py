"""Parses Anthropic's messages API: a body becomes an Ask, by way of an equivalent OpenAI body.

Backends of OpenAI's dialect get the OpenAI body, and the chat template reads it; backends of Anthropic's dialect
get the client's own body. Fields without a counterpart at OpenAI use the names of servers of open models: thinking is
`reasoning_content`, whether to think is `chat_template_kwargs.enable_thinking`, and `cache_control` stays in place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from backends.messages.answer import MESSAGES_PATH
from policies.errors import InvalidRequest
from policies.nouns import Native
from router.ask import Ask
from router.protocols.anthropic.fields import (
    Block,
    CountBody,
    MediaSource,
    MessagesBody,
    ToolChoice,
    Turn,
)
from router.protocols.anthropic.tools import functions_of
from router.protocols.dialect import converted, members_beyond
from router.protocols.openai.grammars import from_field
from router.protocols.openai.request import chat_ask
from router.protocols.untranslated import MESSAGES, untranslated
from router.text.conversation import without_billing
from router.text.documents import MARK

COUNT_PATH = "/v1/messages/count_tokens"
VERSIONS = ("2023-06-01", "2026-10-21")
"""Supported values of `anthropic-version`. The newer version has no `temperature`, `top_p` and `top_k`; models
that are not Anthropic's have them, so they are accepted in both."""

_PASSED_HEADERS = ("anthropic-beta", "anthropic-version")
"""Headers that define how a body is read: without the first, backends reject fields of a beta."""

_Fields = TypeVar("_Fields", bound=CountBody)

_HINTS = {
    "model": "GET /v1/models lists the models",
    "max_tokens": "Anthropic's API requires the answer's maximum length: at least 1",
    "messages": "`messages` is a list of objects such as {'role': 'user', 'content': 'Hello'}",
    "temperature": "from 0 to 1 in Anthropic's API",
    "tools": "a tool is {'name': ..., 'description': ..., 'input_schema': {...}}",
}
_ELSEWHERE = "see Anthropic's API reference for this field"
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_IDLE = ("service_tier", "context_management", "cache_control", "inference_geo", "speed")
"""Hints to Anthropic's own servers; its backends get them with the client's body."""
_INSTEAD = {
    "n": "send several calls",
    "max_completion_tokens": "say `max_tokens`",
    "response_format": "use `output_config.format`",
    "logprobs": "Anthropic's API has none",
    "top_logprobs": "Anthropic's API has none",
    "stream_options": "usage always comes",
    "functions": "say `tools`",
    "function_call": "say `tool_choice`",
    "continue_final_message": "end with a message of the assistant",
    "add_generation_prompt": "end with a message of the assistant",
}
_DOCUMENTS = frozenset({"document", "search_result"})
_THE_PROVIDERS = frozenset(
    {"redacted_thinking", "server_tool_use", "mcp_tool_use", "mcp_tool_result", "web_search_tool_result"}
    | {"web_fetch_tool_result", "code_execution_tool_result", "bash_code_execution_tool_result", "container_upload"}
    | {"text_editor_code_execution_tool_result", "tool_search_tool_result", "compaction"}
)
"""Blocks of the assistant that are encrypted, or tell of tools that Anthropic's servers ran."""
_COPIED = ("max_tokens", "temperature", "top_p", "top_k", "stream")


def messages_ask(body: Mapping[str, Any], headers: Mapping[str, str]) -> Ask:
    """The Ask of a body of /v1/messages. `headers` have lower-case names. Raises InvalidRequest."""
    require_known_version(headers)
    fields = converted(body, MessagesBody, hints=_HINTS, elsewhere=_ELSEWHERE)
    more = members_beyond(body, MessagesBody, idle=_IDLE, instead=_INSTEAD)
    if "document_order" in more and "documents" not in more:
        fields.messages, documents = _lifted(fields.messages)
        more |= {"documents": documents} if documents else {}
    sampling_fields = {name: value for name in _COPIED if (value := getattr(fields, name)) is not None}
    if fields.stop_sequences:
        sampling_fields["stop"] = fields.stop_sequences
    if fields.metadata is not None and fields.metadata.user_id is not None:
        sampling_fields["user"] = fields.metadata.user_id
    ask = chat_ask(more | _chat(fields) | sampling_fields, headers)
    metadata = {} if "user" not in sampling_fields else {"user_id": sampling_fields["user"]}
    sampling = from_field("output_config.format", ask.sampling)
    return replace(
        ask,
        natives=(Native(MESSAGES_PATH, body),),
        include_usage=True,
        metadata=metadata,
        passed_headers=_passed_headers(headers),
        sampling=sampling,
    )


def untranslated_messages(body: Mapping[str, Any], headers: Mapping[str, str], refusal: InvalidRequest) -> Ask:
    """The Ask of a body of /v1/messages that is passed on or refused by `refusal`. Raises that."""
    ask = untranslated(body, headers, MESSAGES, refusal)
    metadata = {} if ask.user is None else {"user_id": ask.user}
    return replace(ask, include_usage=True, metadata=metadata, passed_headers=_passed_headers(headers))


def _passed_headers(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: headers[name] for name in _PASSED_HEADERS if name in headers}


def _lifted(turns: Sequence[Turn]) -> tuple[list[Turn], list[dict[str, Any]]]:
    """`turns` with a mark in place of the documents and search results of plain text in the first message of the user
    that has any, and these as `documents` of a chat; the source of a search result is its id.

    Those of later messages stay where they are: a conversation that goes on begins as before.
    """
    for number, turn in enumerate(turns):
        if turn.role != "user" or isinstance(turn.content, str):
            continue
        rest, documents = list[Block](), list[dict[str, Any]]()
        for block in turn.content:
            if block.type not in _DOCUMENTS or (text := _inner(block)) is None:
                rest.append(block)
                continue
            if not documents:
                rest.append(Block("text", text=MARK))
            named = {"id": block.source} if isinstance(block.source, str) else {}
            documents.append({"text": text, "title": block.title or "", **named})
        if documents:
            return [*turns[:number], Turn("user", rest), *turns[number + 1 :]], documents
    return list(turns), []


def counted_messages(body: Mapping[str, Any], headers: Mapping[str, str]) -> Ask:
    """The Ask for counting the prompt's tokens. Raises InvalidRequest."""
    require_known_version(headers)
    return chat_ask(_chat(converted(body, CountBody, hints=_HINTS, elsewhere=_ELSEWHERE)), headers)


def require_known_version(headers: Mapping[str, str]) -> None:
    """Raise InvalidRequest if `anthropic-version` is not supported; a missing one means any."""
    version = headers.get("anthropic-version", VERSIONS[-1])
    if version not in VERSIONS:
        hint = f"send 'anthropic-version: {VERSIONS[-1]}'"
        raise InvalidRequest(f"anthropic-version: '{version[:40]}' is not supported", hint=hint)


def _chat(fields: CountBody) -> dict[str, Any]:
    """Prompt and answer format, as a body of /v1/chat/completions."""
    turns = (message for at, turn in enumerate(fields.messages) for message in _turn(turn, at))
    messages = [*_system(fields.system), *turns]
    body: dict[str, Any] = {"model": fields.model, "messages": messages}
    if fields.messages[-1].role == "assistant" and messages[-1].get("content"):
        # Anthropic's prefill: the answer continues the last message
        body |= {"continue_final_message": True, "add_generation_prompt": False}
    if fields.tools:
        body["tools"] = functions_of(fields.tools)
    if fields.tool_choice is not None and (body.get("tools") or fields.tool_choice.type in ("any", "tool")):
        body |= _tool_choice(fields.tool_choice, body.get("tools") or ())
    if not body.get("tools"):
        body.pop("tools", None)
    if fields.thinking is not None:
        body["chat_template_kwargs"] = {"enable_thinking": fields.thinking.type != "disabled"}
    return body | _output(fields)


def _output(fields: CountBody) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if fields.output_config is not None and fields.output_config.effort is not None:
        options["reasoning_effort"] = fields.output_config.effort
    if fields.output_config is not None and (shape := fields.output_config.format) is not None:
        named = {"name": "answer", "schema": shape.schema, "strict": True}
        options["response_format"] = {"type": "json_schema", "json_schema": named}
    return options


def _system(system: str | Sequence[Block] | None) -> Iterator[dict[str, Any]]:
    blocks = [Block("text", text=system)] if isinstance(system, str) else system or ()
    # engines join blocks, and only here is it known where a block ends
    if parts := without_billing([_part(block, f"system[{at}]") for at, block in enumerate(blocks)]):
        yield {"role": "system", "content": _joined(parts)}


def _turn(turn: Turn, at: int) -> Iterator[dict[str, Any]]:
    """The OpenAI messages of `turn`: results of tools are messages of their own."""
    where = f"messages[{at}].content"
    if isinstance(turn.content, str):
        yield {"role": turn.role, "content": turn.content}
    elif turn.role == "assistant":
        yield _assistant(turn.content, where)
    else:
        yield from _user(turn.role, turn.content, where)


def _user(role: str, blocks: Sequence[Block], where: str) -> Iterator[dict[str, Any]]:
    rest = []
    for at, block in enumerate(blocks):
        if block.type == "tool_result":
            yield _tool_result(block, f"{where}[{at}]")
        else:
            rest.append((at, block))
    if rest:
        parts = [_part(block, f"{where}[{at}]") for at, block in rest]
        yield {"role": role, "content": _joined(parts)}


def _assistant(blocks: Sequence[Block], where: str) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant"}
    parts, calls, thoughts = [], [], []
    for at, block in enumerate(blocks):
        if block.type == "tool_use":
            calls.append(_tool_call(block, f"{where}[{at}]"))
        elif block.type == "thinking":
            thoughts.append(block.thinking or "")
        elif block.type not in _THE_PROVIDERS:
            parts.append(_part(block, f"{where}[{at}]"))
    message["content"] = _joined(parts) if parts else None if calls else ""
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _tool_call(block: Block, where: str) -> dict[str, Any]:
    if not block.id or not block.name:
        raise InvalidRequest(f"{where}: a tool_use block needs `id` and `name`", hint="send it as it came", param=where)
    arguments = msgspec.json.encode(block.input or {}).decode()
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": arguments}}


def _tool_result(block: Block, where: str) -> dict[str, Any]:
    if not block.tool_use_id:
        hint = "name the tool_use block that it answers"
        raise InvalidRequest(f"{where}: a tool_result block needs `tool_use_id`", hint=hint, param=where)
    content = _content(block.content if isinstance(block.content, str | list) else "", f"{where}.content")
    if not isinstance(content, str) and all(part["type"] == "text" for part in content):
        content = "".join(part["text"] for part in content)
    if block.is_error:
        # OpenAI's dialect has no flag for an error, and the model should know of it
        is_text = isinstance(content, str)
        content = f"Error: {content}" if is_text else [{"type": "text", "text": "Error: "}, *content]
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}


def _content(content: str | Sequence[Block], where: str) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    return _joined([_part(block, f"{where}[{at}]") for at, block in enumerate(content)])


def _joined(parts: Sequence[Mapping[str, Any]]) -> str | list[dict[str, Any]]:
    """One text, unless a part is not text or has marks: servers that read marks need them in place."""
    is_text = all(part["type"] == "text" and len(part) == 2 for part in parts)
    return "".join(part["text"] for part in parts) if is_text else [dict(part) for part in parts]


def _part(block: Block, where: str) -> dict[str, Any]:
    """A part for `block`, with its `cache_control`. Raises InvalidRequest if OpenAI's dialect has no such part."""
    text = _text(block)
    part = _media(block) if text is None else {"type": "text", "text": text}
    if part is None:
        hint = "text, images, tool_use, tool_result and thinking are, documents by value, and search results"
        raise InvalidRequest(f"{where}: blocks of type '{block.type[:40]}' are not supported", hint=hint, param=where)
    return part | ({"cache_control": block.cache_control} if block.cache_control else {})


def _media(block: Block) -> dict[str, Any] | None:
    """An image or a file of `block` in OpenAI's dialect; None if it has no such part."""
    source = block.source
    if not isinstance(source, MediaSource):
        return None
    data = f"data:{source.media_type};base64,{source.data}" if source.type == "base64" and source.data else None
    url = data or (source.url if source.type == "url" else None)
    if block.type == "image" and url:
        return {"type": "image_url", "image_url": {"url": url}}
    if block.type == "document" and data:
        return {"type": "file", "file": {"filename": block.title or "document", "file_data": data}}
    return None


def _text(block: Block) -> str | None:
    if block.type == "text":
        return block.text
    inner = _inner(block)
    return inner if inner is None or not block.title else f"{block.title}\n{inner}"


def _inner(block: Block) -> str | None:
    """The plain text of a document or a search result."""
    inner: str | None = None
    if block.type == "document" and isinstance(block.source, msgspec.Struct) and block.source.type == "text":
        inner = block.source.data
    elif block.type == "search_result" and isinstance(block.content, list):
        inner = "\n".join(part.text or "" for part in block.content)
    return inner


def _tool_choice(choice: ToolChoice, functions: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    if choice.type == "tool" and not choice.name:
        raise InvalidRequest("tool_choice names no tool", hint="give its `name`", param="tool_choice.name")
    if not functions and choice.type in ("any", "tool"):
        what = "tool_choice: a tool is required, and no tool of the request can be used with this model"
        raise InvalidRequest(what, hint="give a tool that the client runs", param="tool_choice")
    named = {"type": "function", "function": {"name": choice.name}}
    chosen: dict[str, Any] = {"tool_choice": _CHOICES.get(choice.type, named)}
    if choice.disable_parallel_tool_use:
        chosen["parallel_tool_calls"] = False
    return chosen
