"""The fields of OpenAI's text API that Pointsman understands, with their types and ranges. Others pass through."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta

from policies.nouns import DIALS

MOST_CHOICES = 128
MOST_DOCUMENTS = 512
MOST_ID_CHARACTERS = 128
MOST_MESSAGES = 32 * 2**10
MOST_PROMPTS = 128
MOST_STOPS = 16
MOST_TITLE_CHARACTERS = 1000
MOST_TOOLS = 2048

_Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
_TokenId = Annotated[int, Meta(ge=0, le=2**32 - 1)]
_Stop = Annotated[str, Meta(min_length=1, max_length=1000)]


class StreamOptions(msgspec.Struct):
    """`stream_options`."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """Of vLLM: each chunk has the usage so far, where usage is asked for at all."""


class ResponseFormat(msgspec.Struct):
    """`response_format`: the shape that an answer must have."""

    type: str
    json_schema: Any = None
    schema: Any = None
    value: Any = None


class StructuredOutputs(msgspec.Struct):
    """`structured_outputs`, vLLM's extension since 0.12; earlier, its members were fields with the prefix `guided_`."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: Annotated[list[str], Meta(min_length=1)] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Any = None


if TYPE_CHECKING:
    _Dials = msgspec.Struct
else:
    _Dials = msgspec.defstruct("_Dials", [(name, hint | None, None) for name, hint in DIALS.items()], kw_only=True)


class Common(_Dials, kw_only=True):
    """The fields of both endpoints, beside DIALS. `regex` and `ebnf` are SGLang's extensions; `top_k`, `min_p`,
    `repetition_penalty`, `min_tokens` and others are vLLM's.
    """

    model: Annotated[str, Meta(min_length=1, max_length=500)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: _Count | None = None
    n: Annotated[int, Meta(ge=1, le=MOST_CHOICES)] | None = None
    stop: _Stop | Annotated[list[_Stop], Meta(max_length=MOST_STOPS)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    logit_bias: dict[str, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    stop_token_ids: Annotated[list[_TokenId], Meta(max_length=256)] | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Meta(min_length=1)] | None = None
    guided_grammar: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=2**63 - 1)] | None = None
    truncation_side: Literal["left", "right"] | None = None


class Part(msgspec.Struct):
    """One part of a message's content."""

    type: str
    text: str | None = None


class CalledFunction(msgspec.Struct):
    """The function of an assistant's tool call; `arguments` are JSON text in OpenAI's API."""

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(msgspec.Struct):
    """One tool call of an assistant message."""

    function: CalledFunction
    id: str | None = None
    type: str | None = None


class Message(msgspec.Struct):
    """One message of a conversation."""

    role: Annotated[str, Meta(min_length=1, max_length=64)]
    content: str | list[Part | str] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


class Function(msgspec.Struct):
    """A function that the model may call."""

    name: Annotated[str, Meta(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(msgspec.Struct):
    """One entry of `tools`."""

    type: Literal["function"]
    function: Function


class DocumentData(msgspec.Struct):
    """`data` of one entry of `documents`, as in Cohere's API."""

    text: str
    title: Annotated[str, Meta(max_length=MOST_TITLE_CHARACTERS)] | None = None


class DocumentFields(msgspec.Struct):
    """One entry of `documents`. `doc_id` is the name of its id in some chat templates."""

    text: str | None = None
    data: DocumentData | str | None = None
    id: Annotated[str, Meta(min_length=1, max_length=MOST_ID_CHARACTERS)] | None = None
    doc_id: Annotated[str, Meta(min_length=1, max_length=MOST_ID_CHARACTERS)] | None = None
    title: Annotated[str, Meta(max_length=MOST_TITLE_CHARACTERS)] | None = None


class ChatBody(Common, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Meta(min_length=1, max_length=MOST_MESSAGES)]
    max_completion_tokens: _Count | None = None
    tools: Annotated[list[Tool], Meta(max_length=MOST_TOOLS)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    documents: Annotated[list[DocumentFields | str], Meta(max_length=MOST_DOCUMENTS)] | None = None
    document_order: Annotated[str, Meta(max_length=20)] | None = None
    document_set: Annotated[str, Meta(min_length=1, max_length=MOST_ID_CHARACTERS)] | None = None
    reuse: Literal["chunks", "off"] | None = None
    reuse_budget: Annotated[float, Meta(ge=0, le=1)] | None = None
    reasoning_effort: str | None = None


class CompletionBody(Common, kw_only=True):
    """`POST /v1/completions`."""

    # 0 with `echo`: return the prompt alone
    max_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    prompt: str | list[Any]
    suffix: str | None = None
    echo: bool | None = None
    best_of: Annotated[int, Meta(ge=1, le=MOST_CHOICES)] | None = None
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
