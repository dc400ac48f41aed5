"""Rejects fields that an engine does not know by name, instead of ignoring them. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from policies.errors import InvalidRequest
from policies.nouns import Sampling

_CLIENTS_NAMES = {
    "min_new_tokens": "min_tokens",
    "choices": "n",
    "top_logprobs": "logprobs",
    "shows_stop": "include_stop_str_in_output",
}
_OF_VLLM = ("structured_outputs.", "guided_")
_USUAL = Sampling()

_READ_BY_THE_ROUTER = frozenset(
    {"model", "messages", "prompt", "stream", "stream_options", "max_tokens", "max_completion_tokens", "best_of"}
    | (set(Sampling.__struct_fields__) - {"grammar"})
    | {"n", "min_tokens", "include_stop_str_in_output", "logprobs", "top_logprobs"}
)
_OF_NO_CONSEQUENCE = frozenset(
    {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"}
)
"""Fields that identify the caller and change no answer."""


def refuse_unsupported(sampling: Sampling, knows: Collection[str], engine: str) -> None:
    """Return if all that is out of the ordinary in `sampling` is in `knows`, names of its fields.

    An engine that supports `grammar` reads the client's `response_format`; vLLM's fields for the same are vLLM's.
    Raises InvalidRequest that names the first field that `engine` does not know.
    """
    for name in Sampling.__struct_fields__:
        if name not in knows and getattr(sampling, name) != getattr(_USUAL, name):
            field = sampling.grammar.field if name == "grammar" and sampling.grammar else _CLIENTS_NAMES.get(name, name)
            raise _unknown(engine, field)
    if sampling.grammar is not None and sampling.grammar.field.startswith(_OF_VLLM):
        raise _unknown(engine, sampling.grammar.field)


def refuse_unknown(body: Mapping[str, Any], knows: Collection[str], engine: str) -> None:
    """Return if each field of a client's `body` in OpenAI's dialect is the router's to read, idle, or in `knows`.

    For adapters that spell a body anew, where nothing goes through by itself. Fields that are null, false or empty ask
    for nothing. Raises InvalidRequest that names the first field that `engine` does not know.
    """
    for name, value in body.items():
        if value and name not in knows and name not in _READ_BY_THE_ROUTER and name not in _OF_NO_CONSEQUENCE:
            raise _unknown(engine, name)


def _unknown(engine: str, name: str) -> InvalidRequest:
    return InvalidRequest(f"{engine} does not know `{name}`", hint=f"leave `{name}` out", param=name)
