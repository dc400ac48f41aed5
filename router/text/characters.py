"""How many characters of a text one token can stand for."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers

_SPLITTING = frozenset({"ByteLevel", "Digits", "Metaspace", "Punctuation", "Split"})
"""Pre-tokenizers that keep all characters, unless their behaviour is Removed."""


def most_characters_of_a_token(tokenizer: Tokenizer, vocabulary: Collection[str]) -> int | None:
    """The length of the longest token, if each character of a text is part of some token; None if that is not certain.

    It is certain for byte pairs over all 256 bytes, if nothing before them shortens the text: no normalizer that may
    (as NFC does), no pre-tokenizer that drops white space, no added token that takes the white space around it.
    """
    added = tokenizer.get_added_tokens_decoder().values()
    parts = _parts(tokenizer.pre_tokenizer, "pretokenizers")
    is_certain = (
        isinstance(tokenizer.model, models.BPE)
        and _covers_all_bytes(tokenizer.model, parts, vocabulary)
        and all(map(_keeps_length, _parts(tokenizer.normalizer, "normalizers")))
        and all(map(_keeps_characters, parts))
        and not any(token.lstrip or token.rstrip for token in added)
    )
    return max(map(len, vocabulary)) if is_certain else None


def _parts(component: Any, members: str) -> list[Mapping[str, Any]]:
    """The settings of a `component` of a tokenizer, or of each of its `members` where it is a sequence."""
    if component is None:
        return []
    settings = json.loads(component.__getstate__())
    return list(settings[members]) if settings["type"] == "Sequence" else [settings]


def _covers_all_bytes(model: models.BPE, splitting: list[Mapping[str, Any]], vocabulary: Collection[str]) -> bool:
    if any(part["type"] == "ByteLevel" for part in splitting):
        return all(byte in vocabulary for byte in pre_tokenizers.ByteLevel.alphabet())
    return bool(model.byte_fallback) and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))


def _keeps_length(normalizer: Mapping[str, Any]) -> bool:
    if normalizer["type"] == "Replace":
        replaced = normalizer["pattern"].get("String")
        return replaced is not None and len(normalizer["content"]) >= len(replaced)
    return bool(normalizer["type"] == "Prepend")


def _keeps_characters(splitting: Mapping[str, Any]) -> bool:
    return splitting["type"] in _SPLITTING and splitting.get("behavior") != "Removed"
