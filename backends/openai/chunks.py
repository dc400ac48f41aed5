"""OpenAI's answers, streamed chunks and whole ones, as Deltas. Pure.

Source: OpenAI API reference, "The chat completion chunk object", "The chat completion object", "The completion object".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from msgspec.structs import replace

from backends.http.nonsense import reported_usage
from policies.nouns import Delta, TokenLogprob, Usage

_ID_MARK = "token_id:"
FINISHES = {"eos_token": "stop", "stop_sequence": "stop"}
"""Finish reasons of TGI before 2.0 that OpenAI calls `stop`."""


def deltas_of(chunk: Mapping[str, Any]) -> Iterator[Delta]:
    """The Deltas of one chunk, or one whole answer, of chat or text completions; usage comes as a Delta of its own.

    Raises KeyError, TypeError, ValueError or AttributeError if it has another shape.
    """
    for choice in chunk.get("choices") or ():
        delta = _chat(choice) if "text" not in choice else _text(choice)
        if delta != Delta(choice=delta.choice):
            yield delta
    if chunk.get("usage"):
        yield Delta(usage=usage_of(chunk["usage"]))


def usage_of(usage: Mapping[str, Any]) -> Usage:
    """OpenAI's usage object as ours. Raises as `deltas_of`, also for values that are no counts."""
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    if cached is None:
        # DeepSeek's and Moonshot's servers say it beside
        cached = usage.get("prompt_cache_hit_tokens")
        cached = usage.get("cached_tokens") if cached is None else cached
    # SGLang puts it beside the choices
    thought = (usage.get("completion_tokens_details") or {}).get("reasoning_tokens", usage.get("reasoning_tokens"))
    # OpenRouter's and LiteLLM's gateways pass Anthropic's count on
    details = usage.get("prompt_tokens_details") or {}
    written = details.get("cache_write_tokens", details.get("cache_creation_tokens"))
    return reported_usage(usage.get("prompt_tokens"), usage.get("completion_tokens"), cached, thought, written)


def _chat(choice: Mapping[str, Any]) -> Delta:
    delta = choice.get("delta") or choice.get("message") or {}
    beside = {name: value for name, value in delta.items() if name not in ("role", "content") and value is not None}
    logprobs = choice.get("logprobs") or {}
    return replace(
        _common(choice),
        text=delta.get("content") or "",
        message=beside or None,
        logprobs=tuple(map(_chat_logprob, logprobs.get("content") or ())),
    )


def _text(choice: Mapping[str, Any]) -> Delta:
    return replace(_common(choice), text=choice["text"] or "", logprobs=tuple(_text_logprobs(choice)))


def _common(choice: Mapping[str, Any]) -> Delta:
    finish, stop = choice.get("finish_reason") or None, choice.get("stop_reason", choice.get("matched_stop"))
    return Delta(
        choice=int(choice.get("index") or 0),
        # vLLM's `return_token_ids`
        token_ids=tuple(choice.get("token_ids") or ()),
        finish_reason=FINISHES.get(finish, finish) if finish else None,
        # vLLM's and SGLang's, which may be a token id as well
        stop=stop if isinstance(stop, str) else None,
    )


def _chat_logprob(entry: Mapping[str, Any]) -> TokenLogprob:
    top = tuple(map(_chat_logprob, entry.get("top_logprobs") or ()))
    # llama.cpp and TabbyAPI report the id
    number = entry.get("id", entry.get("token_id"))
    token_id = number if isinstance(number, int) else _token_id(entry["token"])
    return TokenLogprob(token_id, entry["token"], float(entry["logprob"]), top)


def _text_logprobs(choice: Mapping[str, Any]) -> Iterator[TokenLogprob]:
    columns = choice.get("logprobs") or {}
    # llama.cpp writes those of text as those of chats
    yield from map(_chat_logprob, columns.get("content") or ())
    tokens = columns.get("tokens") or ()
    tops = columns.get("top_logprobs") or [None] * len(tokens)
    for token, logprob, top in zip(tokens, columns.get("token_logprobs") or (), tops, strict=True):
        others = tuple(TokenLogprob(_token_id(other), other, value) for other, value in (top or {}).items())
        # the first token of an echoed prompt has no probability
        yield TokenLogprob(_token_id(token), token, 0.0 if logprob is None else float(logprob), others)


def _token_id(token: str) -> int:
    """The id if a backend reports it (vLLM's `return_tokens_as_token_ids`), else 0: the dialect has no ids."""
    return int(token.removeprefix(_ID_MARK)) if token.startswith(_ID_MARK) else 0
