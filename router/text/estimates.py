"""Prompts without a tokenizer: estimated lengths, and keys of their text."""

from __future__ import annotations

import re

import msgspec

from policies.learning.text_length import MEDIA_TOKENS, Estimate, Measured, TextLength, measured
from policies.nouns import Capability
from policies.prefix.text_keys import CHUNK_BYTES, text_keys
from router.ask import Ask, Chat, Input
from router.text.token_ids import count
from router.text.tokenize import Tokens
from shards.kv.keys import block_keys

_MEDIA_MARK = re.compile("\x1d[^\x1d]{1,40}\x1d")
"""Mark of an image, a sound or a file in the text of a chat: its kind and a hash of its bytes."""

MOST_LONG_MEDIA = 64
"""Most images of one prompt that its keys make as long as their tokens, to bound the text."""


def estimated(ask: Ask, root: int, length: TextLength) -> list[Tokens]:
    """Every input of `ask` with the length that `length` estimates, for models without a tokenizer here.

    Keys are those of its text below `root`, or of its token ids if it has some. Token ids are counted, not estimated,
    except in calls for embeddings with many texts, each of which has to fit by itself.
    """
    found = []
    for given in ask.inputs:
        found.append(_estimated(given, ask, root, length))  # noqa: PERF401 - a comprehension is a call before Python 3.12
    return found


def keyed_bytes(given: Chat) -> bytes:
    """The text of which `given` gets its keys, where no tokenizer is known."""
    tools = msgspec.json.encode(given.tools).decode() if given.tools else ""
    return _keyed_text(given, tools).encode("utf-8", "surrogatepass")


def _estimated(given: Input, ask: Ask, root: int, length: TextLength) -> Tokens:
    if isinstance(given, bytes):
        is_exact = Capability.EMBEDDINGS not in ask.needs and ask.reading.most_tokens is None
        ids, least = (given, None) if is_exact else (b"", 1)
        return Tokens(max(1, count(given)), ids, block_keys(given, root), least=least)
    tools = msgspec.json.encode(given.tools).decode() if isinstance(given, Chat) and given.tools else ""
    prompt, most = _measured(given, tools), ask.reading.most_tokens
    estimate = length.estimate(prompt)
    if most is not None:
        estimate = _cut(estimate, most)
    # lone surrogates, which UTF-8 cannot encode, are hashed as Python encodes them
    data = _keyed_text(given, tools).encode("utf-8", "surrogatepass")
    return Tokens(
        estimate.tokens,
        keys=text_keys(data, root) if len(data) >= CHUNK_BYTES else (),
        key_tokens=estimate.tokens / max(1.0, len(data) / CHUNK_BYTES),
        echo=given if ask.echo and isinstance(given, str) else "",
        least=estimate.least,
        likely=(estimate.low, estimate.high),
        measured=prompt if most is None else None,
    )


def _cut(estimate: Estimate, most: int) -> Estimate:
    """`estimate` of a prompt that the engine truncates to `most` tokens; negative: to the rest of its context."""
    limit = max(1, most) if most >= 0 else estimate.high
    return Estimate(min(limit, estimate.tokens), min(limit, estimate.low), min(limit, estimate.high), 1)


def _measured(given: Chat | str, tools: str) -> Measured:
    if isinstance(given, str):
        return measured([given])
    texts: tuple[list[str], list[str]] = ([], [])
    for message in given.messages:
        calls = message.get("tool_calls")
        text = message["content"] + (msgspec.json.encode(calls).decode() if calls else "")
        texts[message["role"] == "assistant"].append(text)
    return measured(
        texts[0],
        replies=texts[1],
        is_chat=True,
        tools=len(given.tools or ()),
        tool_bytes=len(tools.encode()),
        media=given.media,
    )


def _keyed_text(given: Chat | str, tools: str) -> str:
    """The text of which `given` gets its keys. An image in it is about as long as the text of as many tokens.

    Otherwise a short question about an image would be shorter than one key, and would never be found in a cache.
    """
    if isinstance(given, str):
        return given
    # prompts that begin alike need texts that begin alike: tools, then message by message
    parts = [tools] if tools else []
    for message in given.messages:
        parts.append(f"{message['role']}\x1f{message['content']}")  # noqa: PERF401 - a comprehension is a call before Python 3.12
    text = "\x1e".join(parts)
    if not given.media:
        return text
    repeated = min(given.media, MOST_LONG_MEDIA)
    return _MEDIA_MARK.sub(lambda mark: mark.group() * (4 * MEDIA_TOKENS // len(mark.group())), text, count=repeated)
