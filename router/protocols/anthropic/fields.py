"""The fields of Anthropic's messages API that Pointsman understands, with their types and ranges.

Source: Anthropic API reference, "Messages", versions 2023-06-01 and 2026-10-21.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from router.protocols.openai.fields import MOST_STOPS, MOST_TOOLS

_Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
_Share = Annotated[float, Meta(ge=0, le=1)]
_Stop = Annotated[str, Meta(min_length=1, max_length=1000)]


class MediaSource(msgspec.Struct):
    """The source of a document or image."""

    type: str
    data: str | None = None
    media_type: str | None = None
    url: str | None = None


class Block(msgspec.Struct):
    """One content block. Its `type` decides which fields it has."""

    type: str
    text: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[Block] | dict[str, Any] | None = None
    is_error: bool | None = None
    thinking: str | None = None
    source: MediaSource | str | None = None
    title: str | None = None
    cache_control: dict[str, Any] | None = None


class Turn(msgspec.Struct):
    """One message."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class ToolDefinition(msgspec.Struct):
    """One entry of `tools`. A `type` other than "custom" is a tool that Anthropic defines."""

    name: Annotated[str, Meta(min_length=1)] | None = None
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    cache_control: dict[str, Any] | None = None


class ToolChoice(msgspec.Struct):
    """`tool_choice`."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Metadata(msgspec.Struct):
    """`metadata`."""

    user_id: str | None = None


class Thinking(msgspec.Struct):
    """`thinking`: whether the model thinks before it answers."""

    type: str


class OutputFormat(msgspec.Struct):
    """`output_config.format`: the shape that an answer must have."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct):
    """`output_config`."""

    effort: str | None = None
    format: OutputFormat | None = None


class CountBody(msgspec.Struct, kw_only=True):
    """`POST /v1/messages/count_tokens`."""

    model: Annotated[str, Meta(min_length=1, max_length=500)]
    messages: Annotated[list[Turn], Meta(min_length=1)]
    system: str | list[Block] | None = None
    tools: Annotated[list[ToolDefinition], Meta(max_length=MOST_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None


class MessagesBody(CountBody, kw_only=True):
    """`POST /v1/messages`."""

    max_tokens: _Count
    stream: bool | None = None
    stop_sequences: Annotated[list[_Stop], Meta(max_length=MOST_STOPS)] | None = None
    temperature: _Share | None = None
    top_p: _Share | None = None
    top_k: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    metadata: Metadata | None = None
