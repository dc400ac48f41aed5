"""The messages of `pointsman.v1.Inference`: parsed into an Ask, made from Deltas. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from google.protobuf.message import DecodeError, Message
from msgspec.structs import replace

from backends import protobuf
from backends.nesting import decode_json
from policies.aliases import Alias
from policies.errors import InvalidRequest
from policies.nouns import DIALS, Delta, TokenLogprob, Usage
from router.ask import Ask
from router.call.caller import Placement
from router.call.disclosure import shown_name
from router.protocols.aliases import aliased, changed
from router.protocols.dialect import Answer, refusal_in, thought_in
from router.protocols.grpc.v1 import inference_pb2 as pb
from router.protocols.openai.request import CHAT_PATH, COMPLETION_PATH, chat_ask, completion_ask
from router.text.token_ids import pack, unpack
from shards.kv.keys import TOKEN_BYTES

_Message = TypeVar("_Message", bound=Message)

_COPIED = ("max_tokens", *DIALS, "seed")


def read_message(raw: bytes, message: _Message) -> _Message:
    """`message`, filled from `raw`. Raises InvalidRequest."""
    try:
        return protobuf.read_message(raw, message)
    except protobuf.TooManyFields as error:
        raise InvalidRequest(str(error)) from error
    except DecodeError as error:
        kind = message.DESCRIPTOR.full_name
        raise InvalidRequest(f"this is not a {kind}: {error}", hint="see inference.proto, or ask reflection") from error


def ask_of(
    message: pb.GenerateRequest,
    headers: Mapping[str, str],
    deadline_s: float | None,
    aliases: Mapping[str, Alias],
) -> Ask:
    """The Ask of `message`, under the same rules as over HTTP. Raises InvalidRequest."""
    body: dict[str, Any] = {"model": message.model, **_sampling(message.sampling)}
    if message.user:
        body["user"] = message.user
    if message.metadata:
        body["metadata"] = dict(message.metadata)
    for name in ("response_format", "structured_outputs"):
        if text := getattr(message, f"{name}_json"):
            body[name] = _read_json(text, f"{name}_json", name)
    ask = _input_ask(body, message, headers, aliases)
    return replace(
        ask,
        # no default of 16 tokens for a raw prompt: that is a custom of OpenAI's HTTP API
        usual_new_tokens=None,
        priority=message.priority or ask.priority,
        session=message.session or ask.session,
        deadline_s=deadline_s,
        stream=True,
        # answers are gRPC messages, never the backend's own bytes
        natives=(),
    )


def counted_ask(message: pb.CountTokensRequest, aliases: Mapping[str, Alias]) -> Ask:
    """The Ask for counting the prompt's tokens. Raises InvalidRequest."""
    whole = pb.GenerateRequest(model=message.model, tools_json=message.tools_json)
    kind = message.WhichOneof("input")
    if kind == "chat":
        whole.chat.CopyFrom(message.chat)
    elif kind == "prompt":
        whole.prompt = message.prompt
    return ask_of(whole, {}, None, aliases)


def reply_of(delta: Delta, choice: int) -> pb.GenerateReply:
    """One piece of a streamed answer."""
    return pb.GenerateReply(
        choice=choice,
        text=delta.text + refusal_in(delta.message or {}),
        token_ids=pack(delta.token_ids),
        logprobs=[_logprob(logprob) for logprob in delta.logprobs],
        finish_reason=delta.finish_reason or "",
        usage=None if delta.usage is None else usage_of(delta.usage),
        tool_calls=_tool_calls(delta.message or {}),
        reasoning=thought_in(delta.message or {}),
    )


def answer_of(answer: Answer) -> pb.Answer:
    """One choice of a whole answer."""
    return pb.Answer(
        text=answer.text + refusal_in(answer.message),
        finish_reason=answer.finish_reason or "",
        token_ids=pack(answer.token_ids),
        logprobs=[_logprob(logprob) for logprob in answer.logprobs],
        tool_calls=_tool_calls(answer.message),
        reasoning=thought_in(answer.message),
    )


def usage_of(usage: Usage) -> pb.Usage:
    """`usage` as a message."""
    return pb.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
        blended_tokens=usage.blended_tokens,
    )


def placement_of(placement: Placement) -> pb.Placement:
    """The placement of a prompt."""
    request = placement.request
    return pb.Placement(
        request_id=request.id,
        tenant=request.tenant,
        service_class=request.service_class,
        pool=placement.pool,
        backend=shown_name(placement.backend),
        documents=request.documents,
    )


def _input_ask(
    body: dict[str, Any], message: pb.GenerateRequest, headers: Mapping[str, str], aliases: Mapping[str, Alias]
) -> Ask:
    kind = message.WhichOneof("input")
    logprobs = message.sampling.logprobs if message.sampling.HasField("logprobs") else None
    if kind == "chat":
        body["messages"] = [_message(turn, at) for at, turn in enumerate(message.chat.messages)]
        if message.tools_json:
            body["tools"] = _read_json(message.tools_json, "tools_json", "tools")
        if message.documents_json:
            body["documents"] = _read_json(message.documents_json, "documents_json", "documents")
        for name in ("document_order", "document_set"):
            if text := getattr(message, name):
                body[name] = text
        if logprobs is not None:
            body |= {"logprobs": True, "top_logprobs": logprobs}
        return chat_ask(_aliased(body, CHAT_PATH, aliases), headers)
    if kind is None:
        hint = "set one of `prompt`, `chat` and `token_ids`"
        raise InvalidRequest("the request has no input", hint=hint, param="input")
    if logprobs is not None:
        body["logprobs"] = logprobs
    body["prompt"] = message.prompt if kind == "prompt" else _ids(message.token_ids)
    return completion_ask(_aliased(body, COMPLETION_PATH, aliases), headers)


def _aliased(body: dict[str, Any], path: str, aliases: Mapping[str, Alias]) -> dict[str, Any]:
    return changed(body, changes) if (changes := aliased(body, path, aliases)) else body


def _sampling(given: pb.Sampling) -> dict[str, Any]:
    fields: dict[str, Any] = {name: getattr(given, name) for name in _COPIED if given.HasField(name)}
    if given.HasField("choices"):
        fields["n"] = given.choices
    if given.stop:
        fields["stop"] = list(given.stop)
    if given.stop_token_ids:
        fields["stop_token_ids"] = list(given.stop_token_ids)
    if given.logit_bias:
        fields["logit_bias"] = {str(token): bias for token, bias in given.logit_bias.items()}
    return fields | ({"ignore_eos": True} if given.ignore_eos else {})


def _message(turn: pb.Message, at: int) -> dict[str, Any]:
    message: dict[str, Any] = {"role": turn.role, "content": turn.content}
    if turn.tool_calls_json:
        where = f"chat.messages[{at}].tool_calls_json"
        message["tool_calls"] = _read_json(turn.tool_calls_json, where, "tool_calls")
    optional = {"tool_call_id": turn.tool_call_id, "name": turn.name}
    return message | {name: value for name, value in optional.items() if value}


def _read_json(text: str, where: str, name: str) -> Any:
    try:
        return decode_json(text)
    except msgspec.MsgspecError as error:
        hint = f"send `{name}` as over HTTP, as JSON text"
        raise InvalidRequest(f"{where}: {error}", hint=hint, param=where) from error


def _ids(token_ids: bytes) -> Sequence[int]:
    if len(token_ids) % TOKEN_BYTES:
        hint = "send little-endian uint32"
        raise InvalidRequest(f"token_ids: {len(token_ids)} bytes are not token ids", hint=hint, param="token_ids")
    return unpack(token_ids).tolist()


def _tool_calls(message: Mapping[str, Any]) -> Iterator[pb.ToolCall]:
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        yield pb.ToolCall(
            index=call.get("index") or 0,
            id=call.get("id") or "",
            name=function.get("name") or "",
            arguments=function.get("arguments") or "",
        )


def _logprob(logprob: TokenLogprob) -> pb.TokenLogprob:
    top = [_logprob(other) for other in logprob.top]
    return pb.TokenLogprob(token_id=logprob.token_id, token=logprob.token, logprob=logprob.logprob, top=top)
