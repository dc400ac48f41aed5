"""Messages of OpenAI's chats as those read them that spell a conversation anew. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from policies.errors import InvalidRequest

_OF_NO_CONSEQUENCE = frozenset(
    {"role", "content", "refusal", "reasoning", "reasoning_content", "thinking_blocks", "annotations", "cache_control"}
)
"""Members that the answering server put beside its text: another one continues from the text."""


def content_of(message: Mapping[str, Any]) -> Any:
    """The content of `message`: a text, parts, or None. A refusal, as a part or beside, is the text that it is."""
    content, refusal = message.get("content"), message.get("refusal")
    if isinstance(content, list):
        content = [_text_of(part) if part.get("type") == "refusal" else part for part in content]
    return content or refusal or content


def refuse_unknown_members(message: Mapping[str, Any], knows: Collection[str], engine: str, where: str) -> None:
    """Return if each member of `message`, which stands at `where`, is in `knows`, or idle, null, false or empty.

    Raises InvalidRequest that names the first that is not.
    """
    for name, value in message.items():
        if value and name not in knows and name not in _OF_NO_CONSEQUENCE:
            raise InvalidRequest(f"{engine} does not know `{where}.{name}`", param=f"{where}.{name}")


def _text_of(refusal: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "text", "text": str(refusal.get("refusal") or "")}
