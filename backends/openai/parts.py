"""Contents of answers that are lists of parts, as Mistral's and LiteLLM's servers write them. Pure.

Source: Mistral API reference, "Chat completion" (chunks of content), vLLM's and SGLang's messages with parts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_THOUGHTS = frozenset({"thinking", "reasoning", "reasoning_text"})
_MOST_DEPTH = 8


def content_of_parts(content: Any) -> tuple[str, dict[str, str]]:
    """The text of `content`, and members of a message for its reasoning and its refusal, where it has any.

    Raises TypeError or AttributeError if it is no list of parts.
    """
    texts, beside = list[str](), dict[str, str]()
    for part in [content] if isinstance(content, dict) else content:
        if isinstance(part, str):
            texts.append(part)
            continue
        kind = part.get("type")
        if kind in _THOUGHTS:
            thought = "".join(_texts_in(part.get(kind) or part.get("text") or part.get("content")))
            beside["reasoning_content"] = beside.get("reasoning_content", "") + thought
        elif kind == "refusal":
            beside["refusal"] = beside.get("refusal", "") + str(part.get("refusal") or "")
        else:
            texts.extend(_texts_in(part.get("text")))
    return "".join(texts), {name: text for name, text in beside.items() if text}


def _texts_in(value: Any, depth: int = 0) -> Iterator[str]:
    """The texts in a text, a part, or a list of these."""
    if isinstance(value, str):
        yield value
    elif depth < _MOST_DEPTH and isinstance(value, dict):
        # OpenAI's assistants have {"text": {"value": ...}}
        yield from _texts_in(value.get("text", value.get("value")), depth + 1)
    elif depth < _MOST_DEPTH and isinstance(value, list):
        for each in value:
            yield from _texts_in(each, depth + 1)
