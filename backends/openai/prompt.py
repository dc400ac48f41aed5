"""Requests to a server with OpenAI's dialect. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from backends.http.backend import native_post
from backends.http.exchange import Post, encoded
from policies.errors import InvalidRequest
from policies.nouns import BEYOND_OPENAI, Prompt, Request, Sampling
from shards.wire.translate import unpack_ids

_NOTHING: Mapping[str, Any] = MappingProxyType({})


def post_of(
    request: Request,
    prompt: Prompt,
    *,
    model: str,
    is_streamed: bool,
    takes_token_ids: bool,
    own: Mapping[str, Any] = _NOTHING,
) -> Post:
    """The client's own body with only `model`, `stream` and `stream_options` changed; every other byte, where known.

    `own` fields replace the client's; a field with None is left out. Without a body,
    one is made of the token ids. Raises InvalidRequest if there is neither, or ids are not taken.
    """
    path, body = prompt.path, prompt.body
    if body is None:
        if not prompt.token_ids or not takes_token_ids:
            raise InvalidRequest("this backend takes text, and the request has token ids only")
        path, body = "/v1/completions", completion_of(request, prompt.token_ids)
    members: dict[str, Any] = {"model": model}
    if is_streamed:
        members |= with_usage(body)
    members |= own
    if (native := prompt.native) is not None and native.body is body:
        return native_post(native, members, is_streamed=is_streamed)
    left_out = {name for name, value in own.items() if value is None}
    sent = {name: value for name, value in {**body, **members}.items() if name not in left_out}
    return Post(path, encoded(sent), is_streamed)


def with_usage(body: Mapping[str, Any]) -> dict[str, Any]:
    """The members of a chat or text `body` with which its answer is a stream that ends with usage."""
    return {"stream": True, "stream_options": {**(body.get("stream_options") or {}), "include_usage": True}}


def completion_of(request: Request, token_ids: bytes) -> dict[str, Any]:
    """A completions body with a prompt of ids. Fields beyond OpenAI's are sent only if requested."""
    sampling = request.sampling
    body: dict[str, Any] = {
        "model": request.model,
        "prompt": list(unpack_ids(token_ids)),
        "max_tokens": request.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "n": sampling.choices,
        "stream": request.stream,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
    }
    if sampling.stop:
        body["stop"] = list(sampling.stop)
    if sampling.logit_bias:
        body["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias.items()}
    if sampling.seed is not None:
        body["seed"] = sampling.seed
    if sampling.top_logprobs is not None:
        body["logprobs"] = sampling.top_logprobs
    return body | _beyond_openai(sampling)


def _beyond_openai(sampling: Sampling) -> dict[str, Any]:
    default = Sampling()
    names = (*BEYOND_OPENAI, "ignore_eos")
    extras = {name: value for name in names if (value := getattr(sampling, name)) != getattr(default, name)}
    if sampling.stop_token_ids:
        extras["stop_token_ids"] = list(sampling.stop_token_ids)
    if sampling.min_new_tokens:
        extras["min_tokens"] = sampling.min_new_tokens
    return extras
