"""OpenAI's chat and text completions in Ollama's words. Pure.

Source: Ollama's docs/api.md ("Generate a chat completion", "Generate a completion"), docs/modelfile ("PARAMETER").
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from backends.http.unsupported import refuse_unknown, refuse_unsupported
from backends.nesting import decode_json
from backends.openai.answer_schema import schema_in
from backends.openai.messages import content_of, refuse_unknown_members
from policies.errors import InvalidRequest
from policies.nouns import Request

_SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed",
    "stop", "top_logprobs", "grammar",
)  # fmt: skip
_THINKING = ("think", "reasoning_effort", "reasoning")
_OF_CHAT = (*_THINKING, "response_format", "format", "options", "tools", "tool_choice", "parallel_tool_calls")
_OF_GENERATE = (*_THINKING, "response_format", "format", "options", "suffix", "system", "images")
_THE_ROUTERS = ("keep_alive", "num_ctx", "truncate", "shift", "raw", "context", "template")
"""Fields that the pool sets or that would undo them; a client's value never reaches Ollama."""
_OPTIONS_NOT_THE_CLIENTS = ("num_ctx", "num_predict", "num_batch", "num_gpu", "main_gpu", "num_thread", "use_mmap")
"""Options that would reload the model, for all clients."""
_OF_MESSAGE = ("name", "tool_calls", "tool_call_id", "images")
_EFFORTS: Mapping[str, str | bool] = {"none": False, "minimal": "low", "xhigh": "max"}


def chat_body(request: Request, body: Mapping[str, Any]) -> dict[str, Any]:
    """A body of `/api/chat` without `model` and `num_ctx`. Raises InvalidRequest for unsupported fields."""
    refuse_unknown(body, (*_OF_CHAT, *_THE_ROUTERS), "Ollama")
    sent = _common(request, body)
    sent["messages"] = messages_of(body["messages"])
    choice = body.get("tool_choice")
    if choice not in (None, "auto", "none"):
        raise InvalidRequest("Ollama cannot be made to call a tool", hint="use 'auto' or 'none'", param="tool_choice")
    if body.get("tools") and choice != "none":
        sent["tools"] = body["tools"]
    return sent


def generate_body(request: Request, body: Mapping[str, Any], *, is_raw: bool) -> dict[str, Any]:
    """A body of `/api/generate` without `model` and `num_ctx`. Raises InvalidRequest for unsupported fields."""
    refuse_unknown(body, (*_OF_GENERATE, *_THE_ROUTERS), "Ollama")
    text = body.get("prompt")
    if not isinstance(text, str):
        raise InvalidRequest("Ollama takes text, and the prompt is token ids", hint="send text", param="prompt")
    if not text:
        # to Ollama an empty prompt is an order to load the model
        raise InvalidRequest("the prompt is empty", hint="send some text", param="prompt")
    sent = _common(request, body) | {"prompt": text}
    sent |= {name: body[name] for name in ("suffix", "system", "images") if body.get(name)}
    # only the template puts a suffix or a system text into its place
    if is_raw and not body.get("suffix") and not body.get("system"):
        sent["raw"] = True
    return sent


def messages_of(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """OpenAI's messages in Ollama's shape: one text and images in base64 each, arguments of calls as objects."""
    called: dict[str, str] = {}
    sent = []
    for at, message in enumerate(messages):
        where = f"messages[{at}]"
        refuse_unknown_members(message, _OF_MESSAGE, "Ollama", where)
        sent.append(_message(message, called, where))
    return sent


def _message(message: Mapping[str, Any], called: dict[str, str], where: str) -> dict[str, Any]:
    """`called` maps the ids of tool calls so far to the names of their functions."""
    role = message["role"]
    text, images = _content(content_of(message), where)
    sent: dict[str, Any] = {"role": "system" if role == "developer" else role, "content": text}
    if images or message.get("images"):
        sent["images"] = [*images, *(message.get("images") or ())]
    if thinking := message.get("reasoning") or message.get("reasoning_content"):
        sent["thinking"] = thinking
    if calls := message.get("tool_calls"):
        sent["tool_calls"] = [_call(call, where) for call in calls]
        called |= {call["id"]: call["function"]["name"] for call in calls if call.get("id")}
    if role in ("tool", "function"):
        sent["role"] = "tool"
        known = message.get("name") or called.get(str(message.get("tool_call_id")))
        sent |= {"tool_name": known} if known else {}
        sent |= {"tool_call_id": message["tool_call_id"]} if message.get("tool_call_id") else {}
    elif message.get("name"):
        raise InvalidRequest("Ollama does not know names of speakers", param=f"{where}.name")
    return sent


def _content(content: Any, where: str) -> tuple[str, list[str]]:
    """Text and images of a message."""
    if content is None or isinstance(content, str):
        return content or "", []
    texts, images = [], []
    for part in content:
        kind = part.get("type")
        if kind == "text":
            texts.append(part["text"])
        elif kind == "image_url":
            images.append(_image(part["image_url"], where))
        else:
            raise InvalidRequest(f"Ollama takes text and images, not '{kind}'", param=f"{where}.content")
    return "\n".join(texts), images


def _image(url: Any, where: str) -> str:
    """The base64 of a data: URL. Ollama fetches nothing."""
    address = url.get("url") if isinstance(url, Mapping) else url
    head, comma, data = str(address).partition(";base64,")
    if not comma or not head.startswith("data:"):
        raise InvalidRequest(
            "Ollama fetches no images", hint="send it as a data: URL in base64", param=f"{where}.content"
        )
    return data


def _call(call: Mapping[str, Any], where: str) -> dict[str, Any]:
    function = call["function"]
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = decode_json(arguments)
        except msgspec.DecodeError as error:
            raise InvalidRequest("the arguments of a tool call are no JSON", param=f"{where}.tool_calls") from error
    called = {"function": {"name": function["name"], "arguments": arguments}}
    return {"id": call["id"], **called} if call.get("id") else called


def _common(request: Request, body: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that both endpoints take."""
    sampling = request.sampling
    refuse_unsupported(sampling, _SAMPLING, "Ollama")
    options = {
        name: value for name, value in (body.get("options") or {}).items() if name not in _OPTIONS_NOT_THE_CLIENTS
    }
    # Ollama's own defaults are not OpenAI's
    options |= {"num_predict": request.max_new_tokens, "temperature": sampling.temperature, "top_p": sampling.top_p}
    given = {
        "top_k": sampling.top_k or None,
        "min_p": sampling.min_p or None,
        "repeat_penalty": sampling.repetition_penalty if sampling.repetition_penalty != 1 else None,
        "presence_penalty": sampling.presence_penalty or None,
        "frequency_penalty": sampling.frequency_penalty or None,
        "seed": sampling.seed,
        "stop": list(sampling.stop) or None,
    }
    options |= {name: value for name, value in given.items() if value is not None}
    sent: dict[str, Any] = {"stream": True, "truncate": False, "shift": False, "options": options}
    if sampling.top_logprobs is not None:
        sent |= {"logprobs": True, "top_logprobs": sampling.top_logprobs}
    if (shape := _shape(body)) is not None:
        sent["format"] = shape
    if (think := _think(body)) is not None:
        sent["think"] = think
    return sent


def _shape(body: Mapping[str, Any]) -> Any:
    """Ollama's `format`: "json", a JSON schema, or None for free text."""
    wanted = body.get("response_format")
    kind = wanted.get("type") if isinstance(wanted, Mapping) else None
    if kind in (None, "text"):
        return body.get("format")
    if kind in ("json_object", "json_schema") and isinstance(wanted, Mapping):
        schema = schema_in(wanted)
        if schema is not None or kind == "json_object":
            return "json" if schema is None else schema
    raise InvalidRequest(
        f"Ollama cannot shape an answer as '{kind}'", hint="give it a json_schema", param="response_format"
    )


def _think(body: Mapping[str, Any]) -> Any:
    """Ollama's `think`: a boolean or a level; None leaves it to the model."""
    if body.get("think") is not None:
        return body["think"]
    reasoning = body.get("reasoning")
    effort = reasoning.get("effort") if isinstance(reasoning, Mapping) else body.get("reasoning_effort")
    return _EFFORTS.get(effort, effort) if isinstance(effort, str) else None
