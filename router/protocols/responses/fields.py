"""The fields of OpenAI's Responses API that Pointsman understands, with their types and ranges.

Source: OpenAI API reference, "Responses".
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from router.protocols.openai.fields import MOST_TOOLS


class ResponsePart(msgspec.Struct):
    """One part of an item's content."""

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = None
    detail: str | None = None
    filename: str | None = None
    file_data: str | None = None


class Item(msgspec.Struct):
    """One entry of `input` that a chat can have. Without a `type` it is a message."""

    type: str = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[ResponsePart] | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    input: str | None = None
    action: dict[str, Any] | None = None
    output: str | list[ResponsePart] | None = None
    summary: list[ResponsePart] | None = None


class ResponseTool(msgspec.Struct):
    """One entry of `tools` that a model calls and a client runs."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: dict[str, Any] | None = None


class Format(msgspec.Struct):
    """`text.format`: the shape that an answer must have."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class Text(msgspec.Struct):
    """`text`."""

    format: Format | None = None
    verbosity: str | None = None


class Reasoning(msgspec.Struct):
    """`reasoning`."""

    effort: str | None = None


class ResponsesBody(msgspec.Struct, kw_only=True):
    """`POST /v1/responses`."""

    model: Annotated[str, Meta(min_length=1, max_length=500)]
    input: str | Annotated[list[dict[str, Any]], Meta(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    stream: bool | None = None
    tools: Annotated[list[dict[str, Any]], Meta(max_length=MOST_TOOLS)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: Text | None = None
    reasoning: Reasoning | None = None
    include: list[str] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None
    background: bool | None = None
