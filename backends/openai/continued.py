"""The rest of an answer that another server began: as a request in OpenAI's dialect, and as usage. Pure.

Source: vLLM's `continue_final_message` and `add_generation_prompt`, which SGLang has too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from policies.nouns import Beginning, Prompt, Request, Usage

_LIMITS = ("max_tokens", "max_completion_tokens")
_LEAST = ("min_tokens", "min_new_tokens")


def rest_of(request: Request, prompt: Prompt) -> tuple[Request, Prompt]:
    """`request` and `prompt`, which has a beginning and a body, for the rest of the answer."""
    body, beginning = prompt.body, prompt.beginning
    assert body is not None, "only texts are continued by text"
    assert beginning is not None, "it is the rest of nothing"
    changed = _continued_chat(body, beginning) if "messages" in body else _continued_text(body, beginning)
    changed |= {name: max(1, body[name] - beginning.tokens) for name in _LIMITS if isinstance(body.get(name), int)}
    changed |= {name: max(0, body[name] - beginning.tokens) for name in _LEAST if isinstance(body.get(name), int)}
    rest = replace(request, max_new_tokens=max(1, request.max_new_tokens - beginning.tokens))
    return rest, replace(prompt, body={**body, **changed}, native=None, beginning=None)


def trailing_space(text: str) -> str:
    """The white space at the end of `text`. Templates may remove it, so a chat is continued in front of it."""
    return text[len(text.rstrip()) :]


def whole_usage(rest: Usage, beginning: Beginning, request: Request) -> Usage:
    """The usage of the whole answer, of what a server reports for the `rest`: to it the `beginning` is prompt.

    If the prompt's tokens are known exactly, so are those of the beginning; a server may send several in one piece.
    """
    begun_tokens = beginning.tokens
    if request.least_prompt_tokens is None and not rest.is_guess:
        begun_tokens = max(begun_tokens, rest.prompt_tokens - request.prompt_tokens)
    prompt_tokens = max(1, rest.prompt_tokens - begun_tokens)
    return replace(
        rest,
        prompt_tokens=prompt_tokens,
        completion_tokens=rest.completion_tokens + begun_tokens,
        cached_tokens=min(rest.cached_tokens, prompt_tokens),
    )


def _continued_text(body: Mapping[str, Any], beginning: Beginning) -> dict[str, Any]:
    return {"prompt": body["prompt"] + beginning.text, "echo": False}


def _continued_chat(body: Mapping[str, Any], beginning: Beginning) -> dict[str, Any]:
    text = beginning.text.rstrip()
    if not text:
        return {}
    messages = list(body["messages"])
    if body.get("continue_final_message"):
        last = messages.pop()
        content = last.get("content") or ""
        joined = content + text if isinstance(content, str) else [*content, {"type": "text", "text": text}]
        messages.append({**last, "content": joined})
    else:
        messages.append({"role": "assistant", "content": text})
    return {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
