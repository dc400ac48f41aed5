"""Prompts without a tokenizer: estimated lengths, and keys of their text."""

from __future__ import annotations

import re

import msgspec

from policies.learning.text_length import MEDIA_TOKENS, Estimate, TextLength, measured
from policies.nouns import Capability
from policies.prefix.text_keys import CHUNK_BYTES, text_keys
from router.ask import Ask, Chat
from router.text.token_ids import count
from router.text.tokenize import Tokens
from shards.kv.keys import block_keys

_MEDIA_MARK = re.compile("\x1d[^\x1d]{1,40}\x1d")
"""Mark of an image, a sound or a file in the text of a chat: its kind and a hash of its bytes."""

_AFTER_ROLE, _AFTER_PART = "\x1f", "\x1e"
_BESIDE = _AFTER_ROLE + _AFTER_PART
"""What a message has in the text of keys beside its role and its content."""

MOST_LONG_MEDIA = 64
"""Most images of one prompt that its keys make as long as their tokens, to bound the text."""


def estimated(ask: Ask, root: int, length: TextLength) -> list[Tokens]:
    """Every input of `ask` with the length that `length` estimates, for models without a tokenizer here.

    Keys are those of its text below `root`, or of its token ids if it has some. Token ids are counted, not estimated,
    except in calls for embeddings with many texts, each of which has to fit by itself.
    """
    found, most = [], ask.reading.most_tokens
    for given in ask.inputs:
        if isinstance(given, bytes):
            is_exact = most is None and Capability.EMBEDDINGS not in ask.needs
            ids, least = (given, None) if is_exact else (b"", 1)
            found.append(Tokens(max(1, count(given)), ids, block_keys(given, root), least=least))
            continue
        if isinstance(given, str):
            tools, characters, is_ascii, prompt = "", len(given), given.isascii(), measured([given])
        else:
            tools = _tools_of(given) if given.tools else ""
            characters, is_ascii = len(tools), True
            both: tuple[list[str], list[str]] = ([], [])
            for message in given.messages:
                role, text = message["role"], message["content"]
                characters += len(role) + len(text) + len(_BESIDE)
                is_ascii = is_ascii and text.isascii()
                if calls := message.get("tool_calls"):
                    text += msgspec.json.encode(calls).decode()
                both[role == "assistant"].append(text)
            prompt = measured(
                both[0],
                replies=both[1],
                is_chat=True,
                tools=len(given.tools or ()),
                tool_bytes=len(tools.encode()) if tools else 0,
                media=given.media,
            )
        estimate = length.estimate(prompt)
        if most is not None:
            estimate = _cut(estimate, most)
        keys: tuple[int, ...] = ()
        key_tokens = float(estimate.tokens)
        if characters >= CHUNK_BYTES or not is_ascii or prompt.media:
            before, data = _keyed(given, tools)
            keys = text_keys(data, root, before=before)
            key_tokens /= max(1.0, (len(before) + len(data)) / CHUNK_BYTES)
        found.append(
            Tokens(
                estimate.tokens,
                keys=keys,
                key_tokens=key_tokens,
                echo=given if ask.echo and isinstance(given, str) else "",
                least=estimate.least,
                likely=(estimate.low, estimate.high),
                measured=prompt if most is None else None,
            )
        )
    return found


def keyed_bytes(given: Chat) -> bytes:
    """The text of which `given` gets its keys, where no tokenizer is known."""
    return b"".join(_keyed(given, _tools_of(given) if given.tools else ""))


def _tools_of(given: Chat) -> str:
    return msgspec.json.encode(given.tools).decode()


def _cut(estimate: Estimate, most: int) -> Estimate:
    """`estimate` of a prompt that the engine truncates to `most` tokens; negative: to the rest of its context."""
    limit = max(1, most) if most >= 0 else estimate.high
    return Estimate(min(limit, estimate.tokens), min(limit, estimate.low), min(limit, estimate.high), 1)


def _keyed(given: Chat | str, tools: str) -> tuple[bytes, bytes]:
    """The text of which `given` gets its keys: its last part, which is often the longest, is not copied once more.

    An image in it is about as long as the text of as many tokens: otherwise a short question about an image would be
    shorter than one key, and would never be found in a cache.
    """
    if isinstance(given, str):
        return b"", _encoded(given)
    # prompts that begin alike need texts that begin alike: tools, then message by message
    parts = [tools, _AFTER_PART] if tools else []
    for message in given.messages:
        parts += (message["role"], _AFTER_ROLE, message["content"], _AFTER_PART)
    before, last = "".join(parts[:-2]), "".join(parts[-2:-1])
    if given.media:
        repeated = min(given.media, MOST_LONG_MEDIA)
        before, last = "", _MEDIA_MARK.sub(_as_long, before + last, count=repeated)
    return _encoded(before), _encoded(last)


def _as_long(mark: re.Match[str]) -> str:
    return mark.group() * (4 * MEDIA_TOKENS // len(mark.group()))


def _encoded(text: str) -> bytes:
    # lone surrogates, which UTF-8 cannot encode, are hashed as Python encodes them
    return text.encode("utf-8", "surrogatepass")
