"""Bodies that cannot be translated, or that no field of ours describes: read for what routing, limits and rules need.

Only backends that speak the dialect may have them, as they came: they know which tools, items and fields they have.
If there is none, the client is told what kept its body from being translated.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from msgspec.structs import replace

from backends.messages.answer import MESSAGES_PATH
from backends.openai.responses import RESPONSES_PATH
from policies.errors import InvalidRequest
from policies.nouns import Capability, Native
from router.ask import Ask
from router.protocols.openai.documents import BLOCK_END, OWN_FIELDS
from router.protocols.openai.request import CHAT_PATH, COMPLETION_PATH, OF_SAMPLING, chat_ask

Parse = Callable[[Mapping[str, Any], Mapping[str, str]], Ask]

_READ = ("model", "stream", "stream_options", "max_tokens", "max_completion_tokens", "n", "user", "metadata")
_TEXTS = frozenset({"text", "content", "output", "arguments", "thinking", "refusal"})
"""Members of messages, items and parts that hold text, or further parts with text."""
_SOURCES = frozenset(
    {"source", "output", "content", "image_url", "input_audio", "video_url", "audio_url", "file", "image"}
)
"""Members of messages, items and parts that tell where an image, a sound or a file is, or have further parts."""
_URLS = frozenset({"url", "image_url", "file_url", "video_url", "audio_url", "image", "video", "audio"})
_SCHEME = re.compile(r"\s*[A-Za-z][A-Za-z0-9+.-]*:")
_FETCHED_BY_THE_PROVIDER = ("web_search_result", "web_fetch_result")


class Passing(NamedTuple):
    """How bodies of one dialect are passed on: to `path`, at backends that `speak` it. Members `prompts` hold the
    prompt, and one of `needed` must be there. `limit` is the member with the most tokens of the answer.
    """

    path: str
    speak: Capability
    prompts: tuple[str, ...]
    needed: tuple[str, ...]
    limit: str = "max_tokens"


CHATS = Passing(CHAT_PATH, Capability.CHATS, ("messages",), ("messages",))
TEXTS = Passing(COMPLETION_PATH, Capability.TEXTS, ("prompt",), ("prompt", "prompt_embeds"))
RESPONSES = Passing(
    RESPONSES_PATH,
    Capability.RESPONSES,
    ("instructions", "input"),
    ("input", "prompt", "previous_response_id", "conversation"),
    "max_output_tokens",
)
MESSAGES = Passing(MESSAGES_PATH, Capability.MESSAGES, ("system", "messages"), ("messages",))


def passing(parse: Parse, way: Passing) -> Parse:
    """`parse`, by which a body that it refuses becomes the Ask of an untranslated one, where that may be."""

    def parsed(body: Mapping[str, Any], headers: Mapping[str, str]) -> Ask:
        try:
            return parse(body, headers)
        except InvalidRequest as refusal:
            return untranslated(body, headers, way, refusal)

    return parsed


def untranslated(
    body: Mapping[str, Any], headers: Mapping[str, str], way: Passing, refusal: InvalidRequest, **beside: Any
) -> Ask:
    """The Ask of `body`, which only backends that speak its dialect may have, with the fields `beside`.

    Raises `refusal` where model, limits or prompt cannot be read, or where the body asks for what the router does.
    """
    prompts = [body[name] for name in way.prompts if body.get(name)]
    texts = "\n".join(_texts_in(prompts))
    is_ours = not OWN_FIELDS.isdisjoint(body) or BLOCK_END in texts
    if is_ours or not any(_is_given(name, body.get(name)) for name in way.needed):
        raise refusal
    known = _known(body, way)
    try:
        ask = chat_ask({**known, "messages": [{"role": "user", "content": texts}]}, headers)
    except InvalidRequest:
        raise refusal from None
    if way.path == COMPLETION_PATH:
        ask = replace(ask, sampling=replace(ask.sampling, choices=ask.sampling.choices * _count(body)))
    urls = tuple(urls_in(prompts))
    is_openai = way.path in (CHAT_PATH, COMPLETION_PATH)
    needs = ask.needs | {way.speak} | ({Capability.MEDIA} if urls else set())
    fields: dict[str, Any] = {
        # no template is tried on what is not understood
        "inputs": (texts or "\n",),
        "bodies": (body if is_openai else {"model": ask.model, "messages": []},),
        "path": way.path if is_openai else CHAT_PATH,
        "natives": (Native(way.path, body, untranslated=refusal),),
        "needs": needs,
        "media_urls": urls,
    }
    return replace(ask, **fields, **beside)


def _known(body: Mapping[str, Any], way: Passing) -> dict[str, Any]:
    """The members of `body` that the router reads, as those of a chat: also how it samples, if that can be read."""
    known = {name: body[name] for name in _READ if name in body}
    if way.limit != "max_tokens":
        known.pop("max_tokens", None)
        known["max_tokens"] = body.get(way.limit)
    if way.path == MESSAGES_PATH:
        metadata = known.pop("metadata", None)
        if isinstance(metadata, Mapping) and metadata.get("user_id") is not None:
            known |= {"user": metadata["user_id"], "metadata": metadata}
    if way.path != CHAT_PATH:
        return known
    sampled = known | {name: body[name] for name in OF_SAMPLING if name in body}
    try:
        chat_ask({**sampled, "messages": [{"role": "user", "content": ""}]})
    except InvalidRequest:
        return known
    return sampled


def _is_given(name: str, prompt: Any) -> bool:
    """Whether it can be a prompt: messages, else a text, an object, or a list."""
    if name == "messages":
        return bool(prompt) and isinstance(prompt, list) and all(isinstance(each, Mapping) for each in prompt)
    return bool(prompt) and isinstance(prompt, str | list | Mapping)


def _count(body: Mapping[str, Any]) -> int:
    """How many prompts a text completion has."""
    count = 0
    for name in TEXTS.needed:
        given = body.get(name)
        if given:
            is_many = isinstance(given, list) and not isinstance(given[0], int)
            count += len(given) if is_many else 1
    return max(1, count)


def _texts_in(value: Any) -> Iterator[str]:
    """The texts of a prompt, first text first."""
    rest = [value]
    while rest:
        item = rest.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, list):
            # popped from the end, so the first item comes next
            rest.extend(reversed(item))
        elif isinstance(item, Mapping):
            rest.extend(reversed([each for name, each in item.items() if name in _TEXTS]))


def urls_in(value: Any) -> Iterator[str]:
    """The URLs of images, sounds and files in a prompt, which an engine would fetch."""
    rest = [value]
    while rest:
        item = rest.pop()
        if isinstance(item, list):
            rest.extend(reversed(item))
        elif isinstance(item, Mapping) and item.get("type") not in _FETCHED_BY_THE_PROVIDER:
            yield from (url for name in _URLS if isinstance(url := item.get(name), str) and _SCHEME.match(url))
            rest.extend(reversed([each for name, each in item.items() if name in _SOURCES]))
